"""The losses that a request may name, each a weighted sum over tokens, and the batch that a request's data become.

    Datum, ... -> batch_of -> Batch -> (learner) -> loss_of(name) -> the sum

p is the policy, q the sampler, A the advantages. Formulas: Tinker's page "Loss Functions". Left out: gspo and
stable_reinforce, several targets a token. A custom loss is computed by the client, who sends its gradient as weights
of `cross_entropy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from plaudit.algorithms.base import LossFn, Output
from plaudit.batch import Batch
from plaudit.maths.losses import clipped_policy
from plaudit.training_api.wire import Array, Datum
from plaudit.types import Stats


def cross_entropy(current: Tensor, part: Batch) -> Tensor:
    """-log p, (n,)."""
    return -current


def importance_sampling(current: Tensor, part: Batch) -> Tensor:
    """-(p / q) A, (n,)."""
    return -(current - part.old).exp() * _advantages(part)


def ppo(current: Tensor, part: Batch, *, clip_low_threshold: float, clip_high_threshold: float) -> Tensor:
    """-min((p / q) A, clip(p / q, low, high) A), (n,)."""
    low, high = 1 - clip_low_threshold, clip_high_threshold - 1
    return clipped_policy(current - part.old, _advantages(part), low=low, high=high)


def cispo(current: Tensor, part: Batch, *, clip_low_threshold: float, clip_high_threshold: float) -> Tensor:
    """-clip(p / q, low, high) A log p, (n,), without a gradient through the ratio."""
    ratio = (current - part.old).detach().exp().clamp(clip_low_threshold, clip_high_threshold)
    return -ratio * _advantages(part) * current


def dro(current: Tensor, part: Batch, *, beta: float) -> Tensor:
    """-A log p + beta / 2 (log p - log q)^2, (n,). Richemond et al. 2024, https://arxiv.org/abs/2405.19107."""
    return 0.5 * beta * (current - part.old).square() - _advantages(part) * current


LOSSES: Mapping[str, Callable[..., Tensor]] = {
    one.__name__: one for one in (cross_entropy, importance_sampling, ppo, cispo, dro)
}
COLUMNS = {"weights": "weight", "logprobs": "behaviour", "advantages": "advantages"}
"""Names of loss_fn_inputs, each with the batch's column."""
TARGETS = "target_tokens"


def loss_of(name: str, options: Mapping[str, float], found: dict[int, Tensor]) -> LossFn:
    """Return the loss. It stores the log-probs of each row, (tokens,), in `found` by the row's number in the batch."""
    token_loss = partial(LOSSES[name], **options)

    def loss(output: Output, part: Batch) -> tuple[Tensor, Stats]:
        assert output.logprobs is not None and part.weight is not None
        sizes = part.lengths.tolist()
        found.update(zip(part.group.tolist(), torch.split(output.logprobs.detach().cpu(), sizes), strict=True))
        return (part.weight * token_loss(output.logprobs, part))[part.trainable].sum(), {}

    return loss


def batch_of(data: Sequence[Datum], loss: str, *, vocabulary: int, positions: int) -> Batch:
    """Return one row a datum: its tokens and, after them, its last target. The row's number is its group.

    Tokens count in the loss where the target is the token that follows in the row. Elsewhere weights, or advantages,
    must be 0, as at padding. Raises ValueError for data that do not fit the loss or the model."""
    names = ("weights",) if loss == "cross_entropy" else ("logprobs", "advantages")
    columns: dict[str, list[Array]] = {name: [] for name in ("tokens", "trainable", *names)}
    if not data:
        raise ValueError("data is empty: give at least one datum")
    for place, datum in enumerate(data):
        tokens, found = _row(datum, f"data[{place}]", names, vocabulary=vocabulary, positions=positions)
        targets = datum.inputs[TARGETS]
        follows = targets == tokens[1:]
        if ((found[names[-1]] != 0) & ~follows).any():
            raise ValueError(
                f"data[{place}]: {names[-1]} is not 0 where {TARGETS} differs from the next token of model_input. "
                "Shift the sequence by one token, or set it to 0 there"
            )
        columns["tokens"].append(tokens)
        columns["trainable"].append(np.append(False, follows))
        for name in names:
            columns[name].append(np.append(np.float32(0), found[name].astype(np.float32)))
    flat = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()}
    batch = Batch(
        tokens=flat["tokens"],
        trainable=flat["trainable"],
        lengths=torch.tensor([len(one.tokens) + 1 for one in data]),
        group=torch.arange(len(data)),
    )
    return batch.with_columns(
        **{"weight": torch.ones(len(batch.tokens))} | {COLUMNS[name]: flat[name] for name in names}
    )


def _row(
    datum: Datum, where: str, names: Sequence[str], *, vocabulary: int, positions: int
) -> tuple[Array, Mapping[str, Array]]:
    """Return a datum's row of tokens and its inputs, both checked."""
    wanted, given = {TARGETS, *names}, datum.inputs
    if set(given) != wanted:
        raise ValueError(
            f"{where}.loss_fn_inputs has {sorted(given)!s:.100}; the loss takes {', '.join(sorted(wanted))}"
        )
    if not 0 < len(datum.tokens) < positions:
        raise ValueError(f"{where} has {len(datum.tokens)} tokens: give 1 to {positions - 1}, the model's positions")
    tokens = np.append(datum.tokens, given[TARGETS][-1:].astype(np.int64))
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ValueError(f"{where} has a token outside of the vocabulary, 0 to {vocabulary - 1}")
    if odd := next((name for name in names if not np.isfinite(given[name]).all()), None):
        raise ValueError(f"{where}.loss_fn_inputs[{odd!r}] has a number that is not finite")
    if not (given[TARGETS] == tokens[1:]).any():
        raise ValueError(f"{where}: no entry of {TARGETS} is the token that follows in model_input")
    return tokens, given


def _advantages(part: Batch) -> Tensor:
    assert part.advantages is not None
    return part.advantages
