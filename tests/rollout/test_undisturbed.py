import random

import numpy as np
import torch

from plaudit.rollout.undisturbed import undisturbed


def test_random_numbers_go_on_and_threads_can_be_set_as_before() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed(number: int) -> None:
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)

    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    seed(1)
    expected = [draw(), draw()]
    seed(1)
    first = draw()
    try:
        with undisturbed():
            seed(2)
            draw()
            torch.set_num_threads(threads + 1)
            torch.set_num_threads = lambda number: None  # type: ignore[assignment]
            raise KeyError
    except KeyError:
        pass
    assert [first, draw()] == expected
    assert (torch.set_num_threads, torch.get_num_threads()) == (set_threads, threads)
