"""What a model is asked with: few numbers of rows, whose fillers neither change an answer nor send a gradient."""

from __future__ import annotations

import pytest
import torch
from tiny import GPT2

from assent.batch import Batch
from assent.learn import readout
from assent.learn.readout import READOUTS
from assent.maths.invariant import few
from assent.models.base import LanguageModel
from assent.models.load import fresh_model
from assent.types import Role, Row


def asked(sizes: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(len(sizes))
    rows = [
        Row(
            tokens=tuple(torch.randint(50, (size,), generator=generator).tolist()),
            trainable=(*(False,) * (size // 2), *(True,) * (size - size // 2)),
        )
        for size in sizes
    ]
    return Batch.of(rows)


def tiny(role: Role) -> LanguageModel:
    head = "lm" if role is Role.POLICY else "scalar"
    return fresh_model(GPT2, head=head, seed=0, vocab_size=50)  # type: ignore[arg-type]


def test_few_is_never_below_and_little_above() -> None:
    assert [few(n) for n in (0, 1, 63, 64, 65, 127, 128, 129, 1484)] == [0, 1, 63, 64, 66, 128, 128, 132, 1504]
    assert all(n <= few(n) <= n * 1.032 for n in range(1, 20_000))
    assert len({few(n) for n in range(1024, 8192)}) == 3 * 32 + 1


def test_batches_of_many_sizes_meet_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, head = tiny(Role.POLICY), set()
    trunk = set()
    model.register_forward_hook(lambda module, given, out: trunk.add(len(out)))
    plain = readout.chosen_logprobs

    def noted(hidden: torch.Tensor, *given: torch.Tensor, **more: object) -> tuple[torch.Tensor, torch.Tensor]:
        head.add(len(hidden))
        return plain(hidden, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(readout, "chosen_logprobs", noted)
    for last in range(2, 16):
        READOUTS[Role.POLICY](model, asked([16] * 16 + [last]), 1.0)
    assert len(trunk) == 2
    assert len(head) <= 3


@pytest.mark.parametrize("role", [Role.POLICY, Role.CRITIC, Role.JUDGE])
@pytest.mark.parametrize("sizes", [[9, 5, 16, 40, 3], [70, 64, 3], [3] * 43])  # 73, 137 and 129 tokens: all filled up
def test_fillers_change_no_answer_and_no_gradient(
    role: Role, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = asked(sizes)
    assert few(len(batch.tokens)) > len(batch.tokens)
    found = []
    for count in (few, lambda n: n):
        monkeypatch.setattr(readout, "few", count)
        model = tiny(role)
        out = READOUTS[role](model, batch, 1.0)
        columns = [x for x in (out.logprobs, out.entropy, out.values, out.scores) if x is not None]
        sum((x * torch.arange(1.0, len(x) + 1)).sum() for x in columns).backward()  # type: ignore[union-attr]
        found.append((columns, [parameter.grad for parameter in model.parameters()]))
    for ours, plain in zip(*(columns for columns, _ in found), strict=True):
        assert ours.shape == plain.shape
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    for ours, plain in zip(*(gradients for _, gradients in found), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-3, rtol=1e-4)
