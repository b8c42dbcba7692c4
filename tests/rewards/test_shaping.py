from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.rewards.settings import RewardSettings, ShapingSettings
from plaudit.rewards.shaping import shape
from plaudit.types import Completion, Finish, Score


def completion(finish: Finish = Finish.EOS) -> Completion:
    return Completion(tokens=(0,), logprobs=(0.0,), versions=(0,), text="x", finish=finish)


def test_shift_then_scale_then_clip() -> None:
    settings = ShapingSettings(shift=1.0, scale=2.0, clip=5.0)
    assert shape(Score(value=0.5), completion(), settings) == 3.0  # (0.5 + 1) * 2, not 0.5 * 2 + 1
    assert shape(Score(value=4.0), completion(), settings) == 5.0  # 10, clipped after the scale
    assert shape(Score(value=-4.0), completion(), settings) == -5.0
    assert shape(Score(value=1.7), completion(), ShapingSettings()) == 1.7


def test_unfinished_answers() -> None:
    cut = completion(Finish.LENGTH)
    scale = {"scale": 2.0, "clip": 0.5, "unfinished_penalty": -3.0}
    assert shape(Score(value=0.2), cut, ShapingSettings(unfinished="score", **scale)) == 0.4
    assert shape(Score(value=0.2), cut, ShapingSettings(unfinished="penalty", **scale)) == -3.0
    assert shape(Score(value=0.2), cut, ShapingSettings(unfinished="mask", **scale)) is None
    for finish in (Finish.EOS, Finish.STOP):
        for unfinished in ("score", "penalty", "mask"):
            assert shape(Score(value=0.2), completion(finish), ShapingSettings(unfinished=unfinished, **scale)) == 0.4


@given(
    st.floats(-9, 9),
    st.floats(-9, 9),
    st.sampled_from(Finish),
    st.sampled_from(["score", "penalty", "mask"]),
    st.floats(0.1, 9),
)
def test_failure_never_becomes_a_number(
    shift: float, scale: float, finish: Finish, unfinished: str, clip: float
) -> None:
    settings = ShapingSettings(shift=shift, scale=scale, clip=clip, unfinished=unfinished)
    assert shape(Score(value=None, reason="x"), completion(finish), settings) is None
    shaped = shape(Score(value=1.0), completion(), settings)
    assert shaped is not None
    assert abs(shaped) <= clip


def test_settings_refuse_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="score, penalty, mask"):
        ShapingSettings(unfinished="drop")
    with pytest.raises(ValueError, match="clip=null"):
        ShapingSettings(clip=0.0)
    with pytest.raises(ValueError, match="shift"):
        ShapingSettings(shift=float("nan"))
    with pytest.raises(ValueError, match="needs function"):
        RewardSettings(kind="function")
    with pytest.raises(ValueError, match="read for kind 'function' only"):
        RewardSettings(kind="gsm8k", function="a.py:b")
    with pytest.raises(ValueError, match="read for kind 'judge' only"):
        RewardSettings(kind="gsm8k", path="x")
    with pytest.raises(ValueError, match="deadline"):
        RewardSettings(deadline=0)


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("judge", {"options": {"a": 1}}, "read for kind 'function', kind 'http', rules only, not for 'judge'"),
        ("judge", {"thread": True}, "thread=True is read for kind 'function', rules only, not for 'judge'"),
        ("judge", {"batch": 64}, "batch=64 is read for kind 'http' only, not for 'judge'"),
        ("http", {"deadline": 5.0, "urls": ["http://h:1"]}, "deadline=5.0 is read for kind 'function', rules only"),
        ("gsm8k", {"timeout": 5.0}, "timeout=5.0 is read for kind 'http' only, not for 'gsm8k'"),
        ("function", {"retries": 1, "function": "a.py:b"}, "retries=1 is read for kind 'http' only"),
    ],
)
def test_what_a_kind_of_reward_does_not_read_is_refused(kind: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RewardSettings(kind=kind, **more)


def test_settings_work_as_omegaconf_structures() -> None:
    from omegaconf import OmegaConf

    structure = OmegaConf.structured(RewardSettings)
    merged = OmegaConf.merge(structure, {"kind": "overlong", "options": {"max_tokens": 5, "cache_tokens": 2}})
    settings = OmegaConf.to_object(merged)
    assert isinstance(settings, RewardSettings)
    assert settings.options == {"max_tokens": 5, "cache_tokens": 2}
    with pytest.raises(ValueError, match="score, penalty, mask"):
        OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ShapingSettings), {"unfinished": "x"}))
