"""Whole evaluations of tiny models on the demo's data."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest
from completions import Endpoint, longer
from rich.console import Console

from plaudit.batch import Batch
from plaudit.data.settings import DataSettings
from plaudit.evaluate.before_after import NO_BREAK, BeforeAfter, before_after
from plaudit.evaluate.bench import Bench
from plaudit.evaluate.evaluation import Evaluation, evaluate, figure_json, number
from plaudit.evaluate.policy import Policy
from plaudit.evaluate.settings import BeforeAfterSettings, EvaluationSettings, SamplingSettings
from plaudit.evaluate.statistics import Interval
from plaudit.monitor.console import ProgressBar, Reporter
from plaudit.monitor.sinks import read_jsonl
from plaudit.rewards.settings import LlmSettings, RewardSettings
from plaudit.tasks.demo import gold

if TYPE_CHECKING:
    from conftest import Task

GOLD = "plaudit.tasks.demo:gold_reward"


def shown(table: Any) -> str:
    console = Console(width=160, record=True, quiet=False, file=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def everything(task: Task, **changes: Any) -> EvaluationSettings:
    settings = EvaluationSettings(
        model=task.first,
        reference=task.second,
        other=task.second,
        judge=task.judge,
        gold=GOLD,
        prompts=str(task.files.prompts_test),
        demonstrations=[str(task.files.sft_validation)],
        preferences=str(task.files.preferences_validation),
        sampling=SamplingSettings(max_tokens=20, samples=2),
        limit=8,
    )
    return dataclasses.replace(settings, **changes)


@pytest.fixture(scope="module")
def whole(task: Task, tmp_path_factory: pytest.TempPathFactory) -> tuple[Evaluation, Path]:
    out = tmp_path_factory.mktemp("out") / "deep"
    return evaluate(everything(task, output=str(out)), reporter=Reporter(quiet=True)), out


def test_every_kind_gives_its_figures(whole: tuple[Evaluation, Path]) -> None:
    figures = whole[0].figures
    expected = {"nll", "perplexity", "length", "unfinished", "distinct_1", "distinct_2", "reward/gold", "reward/judge"}
    expected |= {"kl", "kl/token", "kl_k3", "kl_k3/token", "preference/judge/accuracy", "preference/judge/margin"}
    expected |= {f"{kind}/{name}" for kind in ("win_rate", "difference", "ties") for name in ("gold", "judge")}
    expected |= {f"win_rate/{name}/length_controlled" for name in ("gold", "judge")}
    expected |= {f"reward/{name}/{whose}" for name in ("gold", "judge") for whose in ("first", "second")}
    assert set(figures) == expected
    assert all(f.low <= f.value <= f.high for f in figures.values() if isinstance(f, Interval))
    assert figures["reward/gold"] == figures["reward/gold/first"]
    assert figures["perplexity"].count == 8  # type: ignore[union-attr]  # limit


PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


def test_every_figure_stands_on_its_page_with_a_unit(whole: tuple[Evaluation, Path]) -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Every figure")[2]
    rows = re.findall(r"^\| (`.*?) \| (.+?) \| .+ \| .+ \|$", text, re.MULTILINE)
    assert all(unit for _, unit in rows)
    known = {name for names, _ in rows for name in re.findall("`(.+?)`", names)}
    of_llm = ["consistent/llm", "unparsed/llm", "failed/llm"]
    of_gold = ["pass@4/gold", "reward/gold/failed", "reward/gold/PART"]
    names = [*whole[0].figures, *of_llm, *of_gold, "preference/policy/accuracy", "agreement"]
    general = {re.sub("pass@[0-9]+", "pass@K", re.sub("/(gold|judge)(?=/|$)", "/NAME", name)) for name in names}
    general = {name.replace("preference/NAME", "preference/judge") for name in general}
    assert general - known == set()


def test_files_hold_what_was_found(whole: tuple[Evaluation, Path], task: Task) -> None:
    result, out = whole
    saved = json.loads((out / "evaluation.json").read_text())
    assert saved["figures"]["kl"]["value"] == result.figures["kl"].value  # type: ignore[union-attr]
    assert saved["settings"]["model"] == task.first
    assert saved["data"]["demonstrations"]["sources"][0]["kept"] == 8
    dump = read_jsonl(out / "generations.jsonl")
    assert len(dump) == 8 * 2
    for line in dump:
        assert line["rewards"]["gold"] == pytest.approx(gold(line["prompt"], line["completion"]))
        assert line["finish"] in ("eos", "length")
        assert line["logprob"] < 0
    pairs = read_jsonl(out / "comparison.jsonl")
    assert [pair["model"]["completion"] for pair in pairs] == [line["completion"] for line in dump]
    assert set(pairs[0]["other"]["rewards"]) == {"gold", "judge"}


def test_answers_of_an_evaluation_before_do_not_stay(whole: tuple[Evaluation, Path], tmp_path: Path) -> None:
    """They would stand beside figures of others."""
    folder = tmp_path / "not" / "there yet"
    whole[0].save(folder)
    assert len(list(folder.iterdir())) == 3
    dataclasses.replace(whole[0], answers=[], pairings=[]).save(folder)
    assert [path.name for path in folder.iterdir()] == ["evaluation.json"]


def test_the_table_shows_every_figure(whole: tuple[Evaluation, Path]) -> None:
    text = shown(whole[0].table())
    assert all(name in text for name in whole[0].figures)
    assert "95 % interval" in text


def test_the_same_settings_give_the_same_result(
    whole: tuple[Evaluation, Path], task: Task, capsys: pytest.CaptureFixture[str]
) -> None:
    again = evaluate(everything(task))
    assert again.figures == whole[0].figures
    assert capsys.readouterr().out == "", "without a reporter nothing is said"
    other = evaluate(everything(task, seed=1, kinds=["generation"]))
    texts, others = ([answer.completion.text for answer in e.answers] for e in (whole[0], other))
    assert texts != others


LOOKS = {"length", "unfinished", "distinct_1", "distinct_2"}
SCORES = {"reward/gold", "reward/judge"}


@pytest.mark.parametrize(
    ("kinds", "scored", "expected"),
    [
        (["generation"], True, LOOKS | SCORES),
        (["generation"], False, LOOKS),
        (["reward"], True, SCORES),
        (["kl"], True, {"kl", "kl/token", "kl_k3", "kl_k3/token"}),
    ],
)
def test_what_is_not_asked_for_is_not_measured(task: Task, kinds: list[str], scored: bool, expected: set[str]) -> None:
    changes: dict[str, Any] = {} if scored else {"judge": None, "gold": None}
    assert set(evaluate(everything(task, kinds=kinds, **changes)).figures) == expected


def test_kl_is_that_of_the_model_from_its_reference(whole: tuple[Evaluation, Path], task: Task) -> None:
    reference = Policy.load(task.second)
    d = [one.logprob - float(reference.logprobs(Batch.of(one.rows())).sum()) for one in whole[0].answers]
    assert whole[0].figures["kl"].value == pytest.approx(fmean(d), abs=1e-4)  # type: ignore[union-attr]


def test_gold_is_called_with_its_options(task: Task, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def twice(completion, factor=1):\n    return 2.0 * factor\n")
    gold = f"{tmp_path / 'mine.py'}:twice"
    result = evaluate(everything(task, kinds=["reward"], gold=gold, gold_options={"factor": 3}))
    assert result.figures["reward/gold"].value == 6.0  # type: ignore[union-attr]


def test_parts_are_in_the_table_and_beside_their_answers(task: Task, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def graded(completion):\n    return {'reward': 1, 'form': len(completion)}\n")
    rewards = [RewardSettings(kind="function", function=f"{tmp_path / 'mine.py'}:graded")]
    out = tmp_path / "out"
    result = evaluate(everything(task, kinds=["reward", "comparison"], rewards=rewards, output=str(out)))
    lines = read_jsonl(out / "generations.jsonl")
    assert [line["parts"] for line in lines] == [{"graded/form": len(line["completion"])} for line in lines]
    mean = fmean(line["parts"]["graded/form"] for line in lines)
    assert result.figures["reward/graded/form"].value == pytest.approx(mean)  # type: ignore[union-attr]
    assert "reward/graded/form" in shown(result.table())
    assert read_jsonl(out / "comparison.jsonl")[0]["model"]["parts"] == lines[0]["parts"]


class Followed(Reporter):
    """Keeps its bars, and how each went on."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.bars: dict[str, ProgressBar] = {}
        self.parts: dict[str, list[int]] = {}

    def track(self, title: str, total: int, *, done: int = 0) -> ProgressBar:
        bar = self.bars[title] = super().track(title, total, done=done)
        parts, advance = self.parts.setdefault(title, []), bar.advance
        bar.advance = lambda by=1: parts.append(by) or advance(by)  # type: ignore[func-returns-value, method-assign]
        return bar


def test_bars_end_at_their_ends_and_score_tokens_cuts_the_passes(task: Task) -> None:
    reporter, settings = Followed(), everything(task, kinds=["perplexity", "kl"], score_tokens=1)
    evaluate(settings, reporter=reporter)
    assert {title: (bar.done, bar.total) for title, bar in reporter.bars.items()} == {
        "perplexity of model": (8, 8),
        "answers of model": (16, 16),
        "KL": (32, 32),  # each answer under both
    }
    assert (reporter.parts["perplexity of model"], reporter.parts["KL"]) == ([1] * 8, [1] * 32)
    assert Bench(settings, reporter).judge(task.judge).token_budget == 1


def test_a_language_model_is_no_judge(task: Task) -> None:
    with pytest.raises(ValueError, match=r"first .*judge.*scalar head"):
        evaluate(EvaluationSettings(judge=task.first, preferences=str(task.files.preferences)))


def test_a_judge_alone_and_a_policy_alone(task: Task) -> None:
    pairs = str(task.files.preferences_validation)
    alone = evaluate(EvaluationSettings(judge=task.judge, preferences=pairs))
    assert list(alone.figures) == ["preference/judge/accuracy", "preference/judge/margin"]
    assert alone.answers == []
    implied = evaluate(EvaluationSettings(model=task.first, reference=task.first, preferences=pairs))
    assert implied.figures["preference/policy/accuracy"].value == 0.5  # type: ignore[union-attr]  # all margins are 0


def test_contradictions_come_before_models(task: Task) -> None:
    with pytest.raises(ValueError, match="which needs reference"):
        evaluate(EvaluationSettings(model="nobody/nothing", prompts=str(task.files.prompts), kinds=["kl"]))


def test_what_would_be_lost_is_refused_before_models(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file.within: Not a directory"):
        evaluate(EvaluationSettings(model="nobody/nothing", prompts=GOLD, output=str(tmp_path / "file/within")))
    with pytest.raises(ValueError, match=r"gold: .*gold_reward"):
        evaluate(EvaluationSettings(model="nobody/nothing", prompts=GOLD, gold=f"{GOLD}s"))


@pytest.mark.parametrize(
    ("gold", "names", "twice"),
    [(None, ("", ""), "gold_reward"), (GOLD, ("gold",), "gold"), (None, ("judge",), "judge")],
)
def test_two_measures_of_one_name_are_refused(gold: str | None, names: tuple[str, ...], twice: str) -> None:
    rewards = [RewardSettings(kind="function", function=GOLD, name=name) for name in names]
    with pytest.raises(ValueError, match=rf"'{twice}'.*`name`"):
        evaluate(EvaluationSettings(model="nobody/nothing", prompts=GOLD, gold=gold, rewards=rewards))


def test_figures_under_home_are_there_alone(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder called ~ is made."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    evaluate(everything(task, kinds=["generation"], output="~/figures"))
    assert (tmp_path / "home" / "figures" / "evaluation.json").exists()
    assert not (tmp_path / "~").exists()


def test_lines_are_spoken(task: Task, tmp_path: Path) -> None:
    reporter = Reporter(quiet=True)
    reporter.log_to(tmp_path / "log.txt")
    evaluate(everything(task, kinds=["generation"], output=str(tmp_path)), reporter=reporter)
    log = (tmp_path / "log.txt").read_text()
    assert "model: 16 answers in" in log
    assert "evaluation.json" in log
    assert "to measure on" not in log  # every row was read as it is


# before and after


def comparison_settings(task: Task) -> BeforeAfterSettings:
    return BeforeAfterSettings(
        gold=GOLD,
        prompts=str(task.files.prompts_test),
        demonstrations=str(task.files.sft_validation),
        preferences=str(task.files.preferences_validation),
        sampling=SamplingSettings(max_tokens=20),
        examples=3,
    )


@pytest.fixture(scope="module")
def both(task: Task, tmp_path_factory: pytest.TempPathFactory) -> tuple[BeforeAfter, Path]:
    out = tmp_path_factory.mktemp("both")
    return before_after(task.first, task.second, settings=comparison_settings(task), judge=task.judge, out=out), out


def test_before_and_after_are_measured_alike(both: tuple[BeforeAfter, Path], task: Task) -> None:
    result = both[0]
    assert set(result.after) - set(result.before) == {"kl", "kl/token", "kl_k3", "kl_k3/token"}
    changes: dict[str, Any] = {"sampling": SamplingSettings(max_tokens=20), "limit": 256}
    alone = evaluate(everything(task, model=task.second, reference=task.first, other=task.first, **changes))
    for name in ("reward/gold", "reward/judge", "perplexity", "unfinished", "kl"):
        assert result.after[name] == alone.figures[name]
    difference = result.after["reward/judge"].value - result.before["reward/judge"].value  # type: ignore[union-attr]
    assert abs(difference) > 1e-3
    assert result.change["difference/judge"].value == pytest.approx(difference)
    assert result.change["win_rate/judge"] == alone.figures["win_rate/judge"]
    assert result.judge["accuracy"] == alone.figures["preference/judge/accuracy"]


def test_completions_lie_side_by_side_with_scores(both: tuple[BeforeAfter, Path]) -> None:
    result, out = both
    assert len(result.pairings) == 10
    assert [result.pairings.index(pairing) for pairing in result.completions] == [0, 3, 6]
    gaps = [p.second.scores["judge"].value - p.first.scores["judge"].value for p in result.pairings]  # type: ignore[operator]
    assert fmean(gaps) == pytest.approx(result.change["difference/judge"].value)
    for pairing in result.completions:
        for answer in (pairing.first, pairing.second):
            assert answer.scores["gold"].value == pytest.approx(gold(pairing.prompt.text, answer.completion.text))
            assert answer.scores["judge"].value is not None
    lines = read_jsonl(out / "comparison.jsonl")
    assert [line["before"]["completion"] for line in lines] == [p.first.completion.text for p in result.pairings]
    text = shown(result.examples())
    assert result.completions[1].prompt.text.split()[0] in text


def test_of_a_chat_the_last_turn_is_shown_without_its_template(both: tuple[BeforeAfter, Path]) -> None:
    pairing = both[0].pairings[0]
    turns = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "How was it?"})
    asked = replace(pairing.prompt, text="<|im_start|>system", messages=turns)
    text = shown(replace(both[0], pairings=[replace(pairing, prompt=asked)]).examples())
    assert "1. How was it?" in text
    assert "im_start" not in text


def test_the_table_and_its_json(both: tuple[BeforeAfter, Path]) -> None:
    result, out = both
    text = shown(result.table())
    for label in ("gold reward", "judge's reward", "KL to before", "perplexity", "judge's accuracy"):
        assert label in text
    assert max(map(len, text.splitlines())) <= 120
    saved = json.loads((out / "evaluation.json").read_text())
    assert saved["after"]["kl"]["value"] == result.after["kl"].value  # type: ignore[union-attr]
    assert set(saved) == {"settings", "before", "after", "change", "judge"}


def test_cells_by_hand(both: tuple[BeforeAfter, Path], tmp_path: Path) -> None:
    def around(value: float, reach: float) -> Interval:
        return Interval(value=value, low=value - reach, high=value + reach, count=4)

    result = dataclasses.replace(
        both[0],
        before={"reward/gold": around(0.5, 0.25), "length": around(7.0, 1.0), "distinct_2": 0.25},
        after={
            "reward/gold": around(0.75, 0.25),
            "length": around(6.0, 1.0),
            "distinct_2": 0.5,
            "kl": around(2.0, 1.0),
        },
        change={"difference/gold": around(0.25, 0.5), "win_rate/gold": around(0.5, 0.25)},
        judge={},
    )
    lines = shown(result.table()).replace(NO_BREAK, " ").splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert rows == [
        [
            "gold reward",
            "0.500 [0.250, 0.750]",
            "0.750 [0.500, 1.00]",
            "+0.250 [-0.250, 0.750]",
            "0.500 [0.250, 0.750]",
        ],
        ["KL to before (nats)", "", "2.00 [1.00, 3.00]", "", ""],
        ["length, tokens", "7.00 [6.00, 8.00]", "6.00 [5.00, 7.00]", "", ""],
        ["distinct word pairs", "0.250", "0.500", "", ""],
    ]
    worse = dataclasses.replace(result, change={"difference/gold": around(-0.25, 0.5)})
    assert " -0.250 [-0.750, 0.250]" in shown(worse.table()).replace(NO_BREAK, " ")
    result.save(tmp_path / "not" / "there yet")
    assert len(list((tmp_path / "not" / "there yet").iterdir())) == 2


def test_a_judge_without_pairs_scores_alone(task: Task) -> None:
    settings = dataclasses.replace(comparison_settings(task), demonstrations=None, preferences=None)
    result = before_after(task.first, task.second, settings=settings, judge=task.judge)
    assert "reward/judge" in result.after
    assert result.judge == {}


def test_a_folder_that_cannot_be_is_refused_before_models(task: Task, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file.within: Not a directory"):
        before_after("nobody/a", "nobody/b", settings=comparison_settings(task), out=tmp_path / "file" / "within")


def test_a_policy_that_did_not_change(task: Task, capsys: pytest.CaptureFixture[str]) -> None:
    settings = dataclasses.replace(comparison_settings(task), demonstrations=None, preferences=None)
    policy = Policy.load(task.first)
    result = before_after(policy, policy, settings=settings)
    assert capsys.readouterr().out == "", "without a reporter nothing is said"
    assert result.change["win_rate/gold"].value == 0.5
    assert result.change["difference/gold"].value == 0.0
    assert result.after["kl"].value == 0.0  # type: ignore[union-attr]
    assert "perplexity" not in result.after
    assert result.judge == {}


def test_numbers_in_tables() -> None:
    assert [number(value) for value in (-0.0001, 0.12345, 1.0, -1.5, 99.994, 100.0, 1234.56)] == [
        *("0.000", "0.123", "1.00", "-1.50", "99.99", "100.0", "1,234.6")
    ]
    assert number(float("inf")) == "inf"
    assert [figure_json(value) for value in (2.0, math.inf, -math.inf, math.nan)] == [2.0, None, None, None]


def test_rows_that_are_measured_on_are_not_called_training_data(task: Task, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [str(task.files.preferences_validation), str(task.files.preferences)]
    settings = everything(task, kinds=["preference"], model=None, preferences=pairs)
    settings.data.max_prompt_tokens, settings.data.max_tokens = 23, 24  # answers are cut, so the report is shown
    evaluate(settings, reporter=Reporter())
    said = capsys.readouterr().out
    assert said.count("to measure on\n") == 1, "one report, though rows of both sources were cut"
    assert said.count("answers that lost their end") == 2
    assert "train" not in said


def test_turns_of_chats_that_are_left_out_are_told_of(task: Task, tmp_path: Path, capsys: Any) -> None:
    turns = [
        ("user", "We saw it ."),
        ("assistant", "The acting is dull ."),
        ("user", "A film ." * 9),
        ("assistant", "A"),
    ]
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}))
    settings = everything(task, kinds=["perplexity"], reference=None, other=None, demonstrations=str(chats))
    settings.data = DataSettings(every_turn=True, overlong="drop", chat_template="default", max_prompt_tokens=80)
    assert evaluate(settings, reporter=Reporter()).figures["perplexity"].count == 1
    assert "turns left out, prompt too long: 1" in capsys.readouterr().out


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with Endpoint(longer) as made:
        yield made.url


@pytest.mark.slow
def test_a_language_model_compares_two_policies(task: Task, endpoint: str, tmp_path: Path) -> None:
    asked = LlmSettings(url=endpoint, model="longer", cache=str(tmp_path / "cache"))
    given = everything(task, judge=None, gold=None, kinds=["comparison"], llm=asked, output=str(tmp_path / "out"))
    result = evaluate(given)
    assert set(result.figures) == {
        *("win_rate/llm", "ties/llm", "win_rate/llm/length_controlled", "consistent/llm", "unparsed/llm", "failed/llm")
    }
    gaps = [len(one.first.completion.text) - len(one.second.completion.text) for one in result.pairings]
    wins = [1.0 if gap > 0 else 0.5 if gap == 0 else 0.0 for gap in gaps]
    assert [decision.value for decision in result.decisions] == wins
    rate = result.figures["win_rate/llm"]
    assert isinstance(rate, Interval)
    assert rate.value == pytest.approx(fmean(wins))
    assert rate.count == 8, "prompts are counted, not pairs"
    assert result.figures["consistent/llm"].value == 1.0  # type: ignore[union-attr]
    assert (result.figures["unparsed/llm"], result.figures["failed/llm"]) == (0.0, 0.0)
    lines = read_jsonl(tmp_path / "out" / "comparison.jsonl")
    assert [line["llm"]["value"] for line in lines] == wins
    again = evaluate(dataclasses.replace(given, llm=dataclasses.replace(asked, url=endpoint, timeout=9.0)))
    assert again.figures == result.figures


EARLY = "^ *[a-f]"


def test_pass_at_k_and_further_rewards_are_figures(task: Task) -> None:
    rule = RewardSettings(kind="matches", name="early", options={"pattern": EARLY})
    judge = RewardSettings(kind="judge", name="second judge", path=task.judge)
    sampling = SamplingSettings(max_tokens=20, samples=4)
    result = evaluate(
        everything(task, kinds=["reward"], gold=None, rewards=[rule, judge], pass_at=[1, 3], sampling=sampling)
    )
    expected = {"reward/early", "reward/judge", "reward/second judge", "pass@1/early", "pass@3/early"}
    assert set(result.figures) == expected
    assert result.figures["reward/judge"] == result.figures["reward/second judge"]
    passing = [
        [re.search(EARLY, result.answers[4 * i + k].completion.text) is not None for k in range(4)] for i in range(8)
    ]
    hand = fmean(fmean(any(three) for three in combinations(own, 3)) for own in passing)
    assert result.figures["pass@1/early"] == result.figures["reward/early"]
    assert result.figures["pass@3/early"].value == pytest.approx(hand)  # type: ignore[union-attr]
    assert 0 < hand < 1, "or the test shows nothing"


def test_results_are_kept_in_the_models_run(task: Task, tmp_path: Path) -> None:
    """Each in a folder of its own; a model of no run leaves nothing."""
    run = tmp_path / "runs" / "mine"
    model = run / "checkpoints" / "policy" / "epoch1epochstep1globalstep1"
    shutil.copytree(task.first, model)
    given = everything(
        task, model=str(model), kinds=["generation"], judge=None, sampling=SamplingSettings(max_tokens=2)
    )
    for count in (1, 2):
        evaluate(given)
        folders = sorted((run / "evaluations").iterdir())
        assert len(folders) == count
    assert {path.name for path in folders[0].iterdir()} == {"evaluation.json", "generations.jsonl"}
    evaluate(dataclasses.replace(given, model=task.first))
    assert sorted(path.name for path in Path(task.first).parent.iterdir()) == ["data", "first", "judge", "second"]
