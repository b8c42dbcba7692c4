"""Groups as JSON and back, and what a replay says of its figures."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from plaudit.loop.progress import Delivery, Moment, Progress
from plaudit.loop.recorded import Compare, RecordedRun, RecordError, RecordGroups, as_json, from_json
from plaudit.monitor.sinks import JsonLines
from plaudit.types import Completion, Episode, Finish, Group, Prompt, Response, Score, Stats

PROMPT = Prompt(id="file:3", text="What?", tokens=(5, 6), answer="42", extra={"level": 2})


def group(index: int, prompt: Prompt = PROMPT) -> Group:
    """Three answers: one over two versions, with a token that a tool gave, one that could not be scored, and one whose
    value stands for the rest."""
    first = Completion(
        tokens=(7, 8, 9, 1),
        logprobs=(-0.1, 0.0, -1.4012984643e-45, -3.4028234663852886e38),
        versions=(3, 3, -1, 4),
        text="a\u2028 “b”\n",
        finish=Finish.EOS,
        episode=Episode(
            sampled=(True, True, False, True),
            restarts=((2, (5, 6)),),
            messages=({"role": "assistant", "content": "a"}, {"role": "user", "content": "“b”"}),
            counts={"turns": 2.0},
        ),
    )
    second = Completion(tokens=(2,), logprobs=(-1 / 3,), versions=(4,), text="", finish=Finish.LENGTH)
    score = Score(value=0.1 + 0.2, parts={"judge": 1e-17, "gold": -2.0})
    failed = Score(value=None, parts={"gold": 1.0}, reason="judge: timed out")
    responses = (
        Response(completion=first, trainable=(True, True, False, True), score=score, reward=0.3),
        Response(completion=second, trainable=(True,), score=failed, reward=None, greedy=True),
        Response(completion=second, trainable=(True,), score=score, reward=None, continues=True),
    )
    return Group(index=index, prompt=prompt, responses=responses)


def moment(step: int, stats: Stats | None = None, *, last: bool = False, **groups: tuple[Group, ...]) -> Moment:
    delivery = Delivery(batch=None, epoch=1, **groups)
    return Moment(progress=Progress(step=step), delivery=delivery, batch=None, stats=stats or {}, last=last)


def test_a_group_comes_back_as_it_was() -> None:
    text = json.dumps(as_json(group(17)))
    assert from_json(json.loads(text), PROMPT) == group(17)
    assert '"versions": [[3, 2], [-1, 1], [4, 1]]' in text


def test_a_record_holds_what_steps_drew_and_goes_on_behind_any_of_them(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"

    async def steps() -> None:
        hook = RecordGroups(JsonLines(path), after=0, threads=3)
        await hook(moment(1, groups=(group(0), group(2)), dropped=(group(1),)))
        await hook(moment(2, groups=(group(3),)))
        with path.open("a") as torn:
            torn.write('{"step": 3, "gro')
        record = RecordedRun(path)
        assert (record.threads, record.steps) == (3, 2)
        for index in (1, 3, 0, 2):
            assert await record.rollout(index, PROMPT) == group(index)
        with pytest.raises(RecordError, match="prompt 4"):
            await record.rollout(4, PROMPT)
        other = Prompt(id="file:9", text="", tokens=(5, 7))
        with pytest.raises(RecordError, match=r"prompt 0 .*file:9.*file:3.*groups"):
            await record.rollout(0, other)
        await RecordGroups(JsonLines(path), after=1, threads=3)(moment(2, groups=(group(9),)))
        assert await RecordedRun(path).rollout(9, PROMPT) == group(9)
        with pytest.raises(RecordError, match="set threads=3"):
            RecordGroups(JsonLines(path), after=2, threads=1)
        with pytest.raises(RecordError, match=r"step 5, .* 2 steps"):
            RecordGroups(JsonLines(path), after=5, threads=3)

    asyncio.run(steps())


def test_a_replay_says_once_where_it_differs() -> None:
    recorded = [{"step": 1, "loss": 0.5, "time/step": 1.0, "odd": None}, {"step": 2, "loss": 0.25}]

    def told(*losses: float) -> list[str]:
        said: list[str] = []

        async def steps() -> None:
            hook = Compare(recorded, said.append)
            for step, loss in enumerate(losses, 1):
                stats = {"loss": loss, "time/step": 9.0, "odd": float("nan"), "mine": 1.0}
                await hook(moment(step, stats, last=step == len(losses)))

        asyncio.run(steps())
        return said

    assert told(0.5, 0.25) == ["the replay's figures equal those of the recorded run, up to step 2"]
    differs = "warning: the replay differs from the record in step 1: loss is 0.5000000000000001, was 0.5"
    assert told(0.5000000000000001, 0.3) == [differs]
    whole = "the replay's figures equal those of the recorded run, up to step 3; the record has no figures of step 3"
    assert told(0.5, 0.25, 7.0) == [whole], "it was ended before it wrote them"
