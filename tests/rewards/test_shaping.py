from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from told import says

from plaudit.rewards.settings import UNFINISHED, RewardSettings, ShapingSettings
from plaudit.rewards.shaping import shaped
from plaudit.support.fields import complaints
from plaudit.types import Completion, Episode, Finish, Score


def completion(finish: Finish = Finish.EOS) -> Completion:
    return Completion(tokens=(0,), logprobs=(0.0,), versions=(0,), text="x", finish=finish)


def reward(value: float, finish: Finish = Finish.EOS, **settings: Any) -> float | None:
    return shaped(completion(finish), Score(value=value), ShapingSettings(**settings)).reward


def test_shift_then_scale_then_clip() -> None:
    settings = {"shift": 1.0, "scale": 2.0, "clip": 5.0}
    assert reward(0.5, **settings) == 3.0  # (0.5 + 1) * 2, not 0.5 * 2 + 1
    assert reward(4.0, **settings) == 5.0  # 10, clipped after the scale
    assert reward(-4.0, **settings) == -5.0
    assert reward(1.7) == 1.7


@pytest.mark.parametrize(
    ("setting", "ends", "continues", "trained"),
    [
        ({"unfinished": "score"}, 0.4, False, True),
        ({"unfinished": "penalty"}, -1.0, False, True),
        ({"unfinished": -3}, -3.0, False, True),
        ({"unfinished": 0.0}, 0.0, False, True),
        ({"unfinished": "bootstrap"}, None, True, True),
        ({"unfinished": "mask"}, None, False, False),
        ({"unfinished": "mask_loss"}, 0.4, False, False),
    ],
)
def test_the_return_of_an_unfinished_answer_has_one_end(
    setting: dict[str, Any], ends: float | None, continues: bool, trained: bool
) -> None:
    settings = ShapingSettings(scale=2.0, clip=0.5, **setting)
    found = shaped(completion(Finish.LENGTH), Score(value=0.2), settings)
    assert (found.reward, found.continues, found.trained) == (ends, continues, trained)
    by_turns = shaped(completion(Finish.TURNS), Score(value=0.2), settings)
    assert by_turns == replace(found, completion=completion(Finish.TURNS))
    for finish in (Finish.EOS, Finish.STOP):
        found = shaped(completion(finish), Score(value=0.2), settings)
        assert (found.reward, found.continues, found.trained) == (0.4, False, True)


@pytest.mark.parametrize(
    ("settings", "trainable"),
    [({}, (1, 1, 0, 0, 1)), ({"unfinished": "penalty"}, (1, 1, 0, 0, 1)), ({"unfinished": "mask_loss"}, (0,) * 5)],
)
def test_tokens_of_the_environment_are_never_trained(settings: dict[str, Any], trainable: tuple[int, ...]) -> None:
    """A call of two tokens, a result of two, and one token more, cut off by the limit of turns."""
    episode = Completion(
        tokens=(5, 6, 7, 8, 9),
        logprobs=(-1.0, -2.0, 0.0, 0.0, -3.0),
        versions=(4, 4, -1, -1, 5),
        text="x",
        finish=Finish.TURNS,
        episode=Episode(sampled=(1, 1, 0, 0, 1)),
    )
    found = shaped(episode, Score(value=0.5), ShapingSettings(**settings))
    assert tuple(found.trainable) == trainable
    assert (found.finished, episode.finished, episode.length) == (False, False, 3)
    whole = shaped(episode, Score(value=None, reason="no"), ShapingSettings())
    assert tuple(whole.trainable) == (1, 1, 0, 0, 1)


@given(
    st.floats(-9, 9),
    st.floats(-9, 9),
    st.sampled_from(Finish),
    st.sampled_from(UNFINISHED),
    st.floats(0.1, 9),
)
def test_failure_never_becomes_a_number(
    shift: float, scale: float, finish: Finish, unfinished: str, clip: float
) -> None:
    settings = ShapingSettings(shift=shift, scale=scale, clip=clip, unfinished=unfinished)
    failed = shaped(completion(finish), Score(value=None, reason="x"), settings)
    assert failed.reward is None and not failed.continues
    found = shaped(completion(), Score(value=1.0), settings).reward
    assert found is not None
    assert abs(found) <= clip


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            ShapingSettings(unfinished="drop"),
            "unfinished=drop .. score, penalty, bootstrap, mask, mask_loss",
        ),
        (ShapingSettings(clip=0.0), "clip=0.0 .. or null"),
        (ShapingSettings(shift=float("nan")), "shift=nan .. finite"),
        (RewardSettings(kind="gsm8k", function="a.py:b"), "function='a.py:b' .. 'function' only"),
        (RewardSettings(kind="gsm8k", path="x"), "path='x' .. 'judge' only"),
        (RewardSettings(kind="gsm8k", deadline=0), "deadline=0 .. (seconds)"),
    ],
)
def test_settings_refuse_what_makes_no_sense(given: Any, told: str) -> None:
    (problem,) = complaints(given)
    assert says(problem, told)


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        (
            "judge",
            {"options": {"a": 1}},
            "options .. 'function', .. 'code', .. 'http', rules only, .. 'judge'",
        ),
        ("judge", {"thread": True}, "thread=True .. 'function', rules only, .. 'judge'"),
        ("judge", {"batch": 64}, "batch=64 .. 'http' only, .. 'judge'"),
        ("http", {"deadline": 5.0, "urls": ["http://h:1"]}, "deadline=5.0 .. 'function', rules only"),
        ("gsm8k", {"timeout": 5.0}, "timeout=5.0 .. 'http' only, .. 'gsm8k'"),
        ("function", {"retries": 1, "function": "a.py:b"}, "retries=1 .. 'http' only"),
    ],
)
def test_what_a_kind_of_reward_does_not_read_is_refused(kind: str, more: dict[str, Any], said: str) -> None:
    assert says("\n".join(complaints(RewardSettings(kind=kind, **more))), said)


def test_settings_work_as_omegaconf_structures() -> None:
    from omegaconf import OmegaConf

    structure = OmegaConf.structured(RewardSettings)
    merged = OmegaConf.merge(structure, {"kind": "overlong", "options": {"max_tokens": 5, "cache_tokens": 2}})
    settings = OmegaConf.to_object(merged)
    assert isinstance(settings, RewardSettings)
    assert settings.options == {"max_tokens": 5, "cache_tokens": 2}
