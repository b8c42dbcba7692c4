import subprocess
import sys
from pathlib import Path

import pytest

from plaudit.evaluate.settings import BeforeAfterSettings, EvaluationSettings, SamplingSettings
from plaudit.rewards.settings import LlmSettings, RewardSettings


def test_kinds_follow_from_what_is_given() -> None:
    policy = {"model": "m/m", "prompts": "rows"}
    assert EvaluationSettings(**policy).chosen() == ["generation"]
    assert EvaluationSettings(**policy, judge="j/j").chosen() == ["generation", "reward"]
    assert EvaluationSettings(**policy, reference="r/r").chosen() == ["generation", "kl"]
    assert EvaluationSettings(**policy, other="o/o").chosen() == ["generation"]  # nobody to judge
    assert EvaluationSettings(judge="j/j", preferences=["rows"]).chosen() == ["preference"]
    assert EvaluationSettings(model="m/m", preferences=["rows"]).chosen() == []
    assert EvaluationSettings(model="m/m", reference="r/r", preferences=["rows"]).chosen() == ["preference"]


def test_every_contradiction_is_listed_at_once(tmp_path: Path) -> None:
    settings = EvaluationSettings(
        model=str(tmp_path / "none"),
        prompts="missing.jsonl",
        kinds=["kl", "comparison", "perplexity"],
        sampling=SamplingSettings(temperature=0.0, samples=2, top_p=0.0),
        limit=0,
        device="tpu",
        gold_options={"a": 1},
    )
    settings.data.train = "train.jsonl"
    with pytest.raises(ValueError, match="contradict") as error:
        settings.check()
    text = str(error.value)
    for expected in (
        "kinds has kl, which needs reference",
        "kinds has comparison, which needs other and judge or gold",
        "kinds has perplexity, which needs demonstrations",
        "kl is estimated on samples of the whole policy",
        "sampling.samples=2 greedy",
        "sampling.top_p=0.0",
        "prompts: there is no missing.jsonl",
        f"model: there is no folder {tmp_path / 'none'}",
        "limit=0",
        "device=tpu",
        "gold_options",
        "data.train",
    ):
        assert expected in text


def test_nothing_to_do_and_unknown_kinds_are_refused() -> None:
    pairs = {"model": "m/m", "preferences": "rows"}
    each = (pairs, "set judge or"), ({"model": "m/m"}, "set prompts"), ({"judge": "j/j"}, "set preferences")
    for given, needed in (*each, ({}, "set model")):
        with pytest.raises(ValueError, match=f"nothing to evaluate: {needed}"):
            EvaluationSettings(**given).check()
    with pytest.raises(ValueError, match=r"kinds=\['kld'\]"):
        EvaluationSettings(model="m/m", kinds=["kld"]).check()


def test_what_measures_ask_of_each_other_is_named() -> None:
    rewards = [RewardSettings(kind="gsm8k", weight=0.5), RewardSettings(path="j/j", workers=2)]
    with pytest.raises(ValueError, match="cannot be used") as error:
        EvaluationSettings(model="m/m", prompts="rows", rewards=rewards, pass_at=[1, 8]).check()
    for expected in ("set sampling.samples=8", "rewards.0.weight is read by runs only", "rewards.1.workers is read by"):
        assert expected in str(error.value)
    with pytest.raises(ValueError, match="gold or rewards"):
        EvaluationSettings(model="m/m", prompts="rows", judge="j/j", pass_at=[1]).check()
    greedy = SamplingSettings(temperature=0.0)
    given = EvaluationSettings(model="m/m", prompts="rows", reference="r/r", sampling=greedy)
    assert given.chosen() == ["generation"], "the KL is left out"
    asked = LlmSettings(url="http://x/v1", model="m")
    given = EvaluationSettings(model="m/m", prompts="rows", other="o/o", llm=asked)
    assert given.chosen() == ["generation", "comparison"]
    rewards = [RewardSettings(kind="gsm8k")]
    assert EvaluationSettings(model="m/m", prompts="rows", rewards=rewards).chosen() == ["generation", "reward"]


def test_before_and_after_need_prompts_and_whole_samples() -> None:
    with pytest.raises(ValueError, match="set prompts") as error:
        BeforeAfterSettings(sampling=SamplingSettings(top_k=5)).check()
    assert "sampling.top_p=1, top_k=0" in str(error.value)


def test_settings_are_a_structured_configuration() -> None:
    from omegaconf import OmegaConf

    for template in (EvaluationSettings, BeforeAfterSettings):
        config = OmegaConf.merge(OmegaConf.structured(template), {"sampling": {"samples": 3}, "prompts": ["a"]})
        found = OmegaConf.to_object(config)
        assert isinstance(found, template)
        assert (found.sampling.samples, found.prompts, found.sampling.whole) == (3, ["a"], True)


def test_settings_import_nothing_heavy() -> None:
    code = "import sys, plaudit.evaluate.settings; print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
