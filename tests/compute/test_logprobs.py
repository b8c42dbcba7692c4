"""Log-probs straight from hidden states, beside torch's own log_softmax and autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from plaudit.compute import logprobs
from plaudit.compute.logprobs import chosen_logprobs, reverse_kl

N, WIDTH, VOCAB = 7, 5, 11


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, WIDTH, generator=generator)
    weight = torch.randn(VOCAB, WIDTH, generator=generator)
    bias = torch.randn(VOCAB, generator=generator)
    targets = torch.randint(VOCAB, (N,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, t: float) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logp = torch.log_softmax(logits / t, -1)
    return logp[torch.arange(len(targets)), targets], -(logp.exp() * logp).sum(-1)


def test_by_hand() -> None:
    # Logits (0, ln 3) / 1: probabilities 1/4 and 3/4. At temperature 1/2 they are (0, ln 9): 1/10 and 9/10.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    chosen, entropy = chosen_logprobs(hidden, weight, torch.tensor([1]))
    assert float(chosen) == pytest.approx(math.log(0.75), abs=1e-6)
    assert float(entropy) == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75), abs=1e-6)
    chosen, _ = chosen_logprobs(hidden, weight, torch.tensor([0]), temperature=0.5)
    assert float(chosen) == pytest.approx(math.log(0.1), abs=1e-6)
    # A bias of (ln 3, 0) makes both equally likely.
    chosen, entropy = chosen_logprobs(hidden, weight, torch.tensor([0]), bias=torch.tensor([math.log(3), 0.0]))
    assert (float(chosen), float(entropy)) == (pytest.approx(-math.log(2)), pytest.approx(math.log(2)))


@pytest.mark.parametrize("keep", [True, False, None], ids=["kept", "recomputed", "of-other-devices"])
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_autograds(
    monkeypatch: pytest.MonkeyPatch, keep: bool | None, chunk_rows: int, with_bias: bool, temperature: float
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk_rows * VOCAB)
    monkeypatch.setattr(logprobs, "LEAST_ROWS", 1)
    monkeypatch.setattr(logprobs, "KEEP_ELEMENTS", N * VOCAB if keep else N * VOCAB - 1)
    if keep is None:
        monkeypatch.setattr(logprobs, "_fused", lambda hidden, axis: True)
    hidden, weight, bias, targets = inputs()
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    head_bias = bias if with_bias else None
    weights = torch.linspace(-1.0, 2.0, N)
    for use_chosen, use_entropy in ((1.0, 0.0), (0.0, 1.0), (1.0, 0.3)):
        ours = chosen_logprobs(hidden, weight, targets, temperature=temperature, bias=head_bias)
        theirs = plain(hidden, weight, head_bias, targets, temperature)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        total = [(weights * (use_chosen * chosen - use_entropy * entropy)).sum() for chosen, entropy in (ours, theirs)]
        for mine, other in zip(
            torch.autograd.grad(total[0], leaves), torch.autograd.grad(total[1], leaves), strict=True
        ):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def test_what_is_kept_is_what_the_limit_says(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, targets = inputs()

    def saved() -> int:
        chosen, _ = chosen_logprobs(hidden, weight, targets)
        return sum(tensor.numel() for tensor in chosen.grad_fn.saved_tensors if tensor is not None)  # type: ignore[union-attr]

    kept = saved()
    monkeypatch.setattr(logprobs, "KEEP_ELEMENTS", N * VOCAB - 1)
    assert kept - saved() == N * VOCAB
    with torch.no_grad():
        assert chosen_logprobs(hidden, weight, targets)[0].grad_fn is None


def test_no_tokens_give_no_logprobs_and_no_gradient() -> None:
    _, weight, _, _ = inputs()
    chosen, entropy = chosen_logprobs(torch.zeros(0, WIDTH), weight, torch.zeros(0, dtype=torch.int64))
    assert chosen.shape == entropy.shape == (0,)
    assert not torch.autograd.grad(chosen.sum(), weight)[0].any()


def test_half_precision_states_give_float32_logprobs_and_gradients_of_their_own_kind() -> None:
    hidden, weight, _, targets = inputs()
    half, head = hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_()
    chosen, entropy = chosen_logprobs(half, head, targets)
    assert chosen.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(chosen, chosen_logprobs(hidden, weight, targets)[0], atol=0.1, rtol=0)
    gradients = torch.autograd.grad(chosen.sum(), [half, head])
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.bfloat16]


OTHER = 13
"""Columns of the other model's head: two more."""


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_reverse_kl_and_its_gradients_are_autograds(
    monkeypatch: pytest.MonkeyPatch, chunk_rows: int, temperature: float
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 4 * chunk_rows * VOCAB)
    monkeypatch.setattr(logprobs, "LEAST_ROWS", 1)
    hidden, weight, bias, _ = inputs()
    other, other_hidden = torch.nn.Linear(3, OTHER), torch.randn(N, 3)
    found = reverse_kl(
        lambda x: x @ weight.T + bias, hidden, other, other_hidden, vocabulary=VOCAB, temperature=temperature
    )
    logp = torch.log_softmax((hidden @ weight.T + bias) / temperature, -1)
    logq = torch.log_softmax(other(other_hidden).detach() / temperature, -1)[:, :VOCAB]
    expected = (logp.exp() * (logp - logq)).sum(-1)
    torch.testing.assert_close(found, expected)
    weights, leaves = torch.linspace(-1.0, 2.0, N), [hidden, weight, bias]
    got = torch.autograd.grad((found * weights).sum(), leaves)
    torch.testing.assert_close(got, torch.autograd.grad((expected * weights).sum(), leaves))
    assert other.weight.grad is None
    with torch.no_grad():
        again = reverse_kl(other, other_hidden, other, other_hidden, vocabulary=OTHER, temperature=temperature)
    torch.testing.assert_close(again, torch.zeros(N), atol=1e-6, rtol=0)


def test_the_reverse_kl_by_hand() -> None:
    # Logits (0, ln 3) and (0, 0): p = (1/4, 3/4), q = (1/2, 1/2).
    first, second = torch.tensor([[0.0, math.log(3)]]), torch.zeros(1, 2)
    found = reverse_kl(lambda x: x.clone(), first, lambda x: x.clone(), second, vocabulary=2)
    assert float(found) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), abs=1e-6)
