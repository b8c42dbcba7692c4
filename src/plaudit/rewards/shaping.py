"""From a raw score to the reward that algorithms see. Group baselines are computed later, from shaped rewards."""

from __future__ import annotations

from plaudit.rewards.settings import ShapingSettings
from plaudit.types import Completion, Numbers, Response, Score


def shaped(completion: Completion, score: Score, settings: ShapingSettings, *, greedy: bool = False) -> Response:
    """Return the completion with its reward: (value + shift) * scale, then clipped; None without a score.

    Tokens of an environment are never trained. `settings.unfinished` chooses what ends the return of an answer that was
    cut off by length, or of an episode by its limit of turns: its own score, a fixed penalty, or the critic's value
    after the cut (`continues`, without a reward). Under `mask` and `mask_loss` none of its tokens is trained; under
    `mask` its reward is None, so that no baseline counts it. Without a score the reward is always None.

    Process rewards are scaled only: shift and clip concern the whole reward, of which the rest stands at the end. A
    fixed penalty replaces them too. A score with one at a token that the policy did not sample has failed.
    """
    if why := _misplaced(completion, score):
        score = Score(value=None, parts=score.parts, reason=why)
    unfinished = not completion.finished and score.value is not None
    cut, penalty = (settings.unfinished, settings.penalty) if unfinished else ("score", None)
    scored = cut in ("score", "mask_loss")
    return Response(
        completion=completion,
        trainable=_trainable(completion, cut not in ("mask", "mask_loss")),
        score=score,
        reward=penalty if penalty is not None else _reward(score, settings) if scored else None,
        process=tuple((at, one * settings.scale) for at, one in score.process) if scored or cut == "bootstrap" else (),
        continues=cut == "bootstrap",
        greedy=greedy,
    )


def _misplaced(completion: Completion, score: Score) -> str:
    """Return why a process reward cannot stand where it does, "" if all can."""
    count = len(completion.tokens)
    for place, _ in score.process:
        if not 0 <= place < count or (completion.episode is not None and not completion.episode.sampled[place]):
            return f"a process reward is at token {place}: give a token that the policy sampled, of 0 to {count - 1}"
    return ""


def _trainable(completion: Completion, trained: bool) -> Numbers:
    if not trained or completion.episode is None:
        return Numbers("b", bytes([trained]) * len(completion.tokens))
    return Numbers("b", completion.episode.sampled)


def _reward(score: Score, settings: ShapingSettings) -> float | None:
    if score.value is None:
        return None
    reward = (score.value + settings.shift) * settings.scale
    return reward if settings.clip is None else max(-settings.clip, min(settings.clip, reward))
