import pytest
import torch

from plaudit.compute.digest import digest
from plaudit.rollout.accepted import Accepted, check_held, check_names
from plaudit.weights.pieces import WeightsError


def weights() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}


def test_the_first_weights_set_the_names_and_later_ones_must_be_newer_and_alike() -> None:
    accepted = Accepted()
    accepted.check(weights(), 5, sent=None)
    accepted.take(weights(), 5)
    for version in (5, 6, 9):
        accepted.check(weights(), version, sent=digest(weights()))
    with pytest.raises(WeightsError, match=r"version 4\b.* 5\b"):
        accepted.check(weights(), 4, sent=None)
    for odd in ({"a": weights()["a"]}, weights() | {"c": torch.ones(1)}, weights() | {"b": torch.ones(2, 2)}):
        with pytest.raises(WeightsError, match=r" [bc] \("):
            accepted.check(odd, 6, sent=digest(odd))


def test_weights_that_changed_on_their_way_are_refused_from_the_first_on() -> None:
    sent = digest(weights())
    for name in weights():
        arrived = weights()
        arrived[name].view(-1)[1] = -arrived[name].view(-1)[1]
        with pytest.raises(WeightsError, match=sent):
            Accepted().check(arrived, 0, sent=sent)


def test_what_an_engine_holds_is_compared_with_what_it_was_given_in_its_own_precision() -> None:
    held = {"a": torch.arange(6.0).view(2, 3).bfloat16(), "b": torch.ones(4)}
    check_held(held, weights())
    check_held(held, weights() | {"a": weights()["a"] * 1.0001})  # rounds to the same
    odd = weights() | {"a": torch.tensor([[float("nan"), -0.0, 2.0], [3.0, 4.0, 5.0]])}
    check_held({name: tensor.bfloat16() for name, tensor in odd.items()}, odd)
    check_held(odd, {name: tensor.t().contiguous().t() for name, tensor in odd.items()})
    for place, value in (((0, 0), 2**-30), ((0, 1), 1 + 2**-7)):  # the next after 1 in bfloat16
        held = {"a": weights()["a"].bfloat16(), "b": weights()["b"]}
        held["a"][place] = value
        with pytest.raises(WeightsError, match=r" a \(1 of 2 tensors\)"):
            check_held(held, weights())
    for name, place, value in (("b", 2, 1 + 1e-6), ("a", (0, 0), -0.0)):
        held = {"a": weights()["a"], "b": weights()["b"]}
        held[name][place] = value
        with pytest.raises(WeightsError, match=rf" {name} \(1 of 2 tensors\)"):
            check_held(held, weights())


def test_names_that_are_not_the_models() -> None:
    check_names(weights(), ["b", "a"])
    with pytest.raises(ValueError, match=r"'b'.*'c'"):
        check_names(weights(), ["a", "c"])
