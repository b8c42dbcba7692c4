"""Record the groups of each step of an online run, and replay them instead of sampling.

    step -> RecordGroups -> groups.jsonl -> RecordedRun.rollout -> the same groups, by the same loop -> the same weights

In an asynchronous run, only two things are random: which version drew a token, and which answers' rewards failed.
Everything after a step's groups is deterministic. Each step is one line, and an incomplete line is ignored. Floats are
written in full. Left out: evaluation, which also samples but does not affect training, and rewards, which are in the
groups.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from plaudit.loop.progress import Moment
from plaudit.monitor.sinks import JsonLines
from plaudit.support.bounded import opened, record
from plaudit.types import Completion, Episode, Finish, Group, Prompt, Response, Score, Stats


class RecordError(ValueError):
    """A record does not belong to this run, or is incomplete."""


class RecordGroups:
    """A hook that writes all groups of a step, including those without a signal. The file's first line has the number
    of threads per rank, on which the last bits of a sum depend."""

    def __init__(self, sink: JsonLines, *, after: int, threads: int):
        """Remove lines of steps after `after`. Raises RecordError if earlier steps are missing or `threads` differs."""
        self.sink, path = sink, sink.path
        self.sink.truncate_after(after)
        if not path.exists() or not path.stat().st_size:
            self.sink.write({"threads": threads})
        found = RecordedRun(path)
        if found.steps != after:
            raise RecordError(
                f"rollout.record=true continues after step {after}, but {path} has the first {found.steps} steps: "
                "record a run from its start, or set rollout.record=false"
            )
        if found.threads != threads:
            raise RecordError(
                f"{path} was recorded with {found.threads} threads per rank, now there are {threads}: set "
                f"threads={found.threads}"
            )

    async def __call__(self, moment: Moment) -> Stats:
        groups = sorted((*moment.delivery.groups, *moment.delivery.dropped), key=lambda group: group.index)
        self.sink.write({"step": moment.progress.step, "groups": [as_json(group) for group in groups]})
        return {}


class RecordedRun:
    """The groups of a recorded run, by their index."""

    def __init__(self, path: Path):
        self.path = path
        self.threads = 0
        self.steps = 0
        """Number of complete steps."""
        self._places: dict[int, int] = {}  # offset of a group's line in the file, by the group's index
        self._line: tuple[int, dict[int, Any]] = (-1, {})  # groups of the last line read: they are asked for in order
        try:
            for place, content in _lines(path):
                self.threads = int(content.get("threads", self.threads))
                self.steps = int(content.get("step", self.steps))
                self._places |= {int(group["index"]): place for group in content.get("groups", ())}
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{path} is no record of groups: {error!r:.200}") from error

    async def rollout(self, index: int, prompt: Prompt) -> Group:
        """Return the recorded group of this prompt. Raises RecordError if there is none, or if it has another
        prompt."""
        if index not in self._places:
            raise RecordError(f"{self.path} ends before prompt {index} of the run")
        values = self._groups(self._places[index])[index]
        if tuple(values["prompt_tokens"]) != prompt.tokens:
            raise RecordError(
                f"prompt {index} of the run is {prompt.id!r} here, and {values['prompt']!r} in {self.path}"
                f"{' with other tokens' if values['prompt'] == prompt.id else ''}: the data has changed since"
            )
        return from_json(values, prompt)

    def _groups(self, place: int) -> dict[int, Any]:
        if self._line[0] != place:
            with opened(self.path) as file:
                file.seek(place)
                self._line = place, {group["index"]: group for group in json.loads(file.readline())["groups"]}
        return self._line[1]


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the byte offset and the parsed JSON of each complete line."""
    place = 0
    with opened(path) as file:
        for line in file:
            if line.endswith(b"\n"):
                yield place, record(line)
            place += len(line)


class Compare:
    """A hook of a replay: report whether its figures equal those of the recorded run, to the last digit."""

    def __init__(self, recorded: Sequence[Mapping[str, Any]], say: Callable[[str], None]):
        self.recorded = {record["step"]: record for record in recorded}
        self.say = say
        self.differs, self.missing = False, dict[int, None]()  # by step: one may be repeated after a failure

    async def __call__(self, moment: Moment) -> Stats:
        step = moment.progress.step
        theirs = self.recorded.get(step)
        if theirs is None:  # the run ended between recording its samples and its figures
            self.missing[step] = None
            theirs = {}
        for name, value in moment.stats.items():
            other = theirs.get(name, value)
            if not self.differs and not name.startswith("time/") and math.isfinite(value) and other != value:
                self.differs = True
                self.say(f"warning: the replay differs from the record in step {step}: {name} is {value}, was {other}")
        if moment.last and not self.differs:
            lack = f"; the record has no figures of step {', '.join(map(str, self.missing))}" if self.missing else ""
            self.say(f"the replay's figures equal those of the recorded run, up to step {step}{lack}")
        return {}


def as_json(group: Group) -> dict[str, Any]:
    return {
        "index": group.index,
        "prompt": group.prompt.id,
        "prompt_tokens": group.prompt.tokens,
        "responses": [_response_json(response) for response in group.responses],
    }


def _response_json(response: Response) -> dict[str, Any]:
    completion, score = response.completion, response.score
    return {
        "tokens": list(completion.tokens),
        "logprobs": list(completion.logprobs),
        "versions": [[version, len(list(run))] for version, run in groupby(completion.versions)],
        **({} if completion.episode is None else {"episode": _episode_json(completion.episode)}),
        "untrained": _places_of_0(response.trainable),
        "text": completion.text,
        "finish": str(completion.finish),
        "score": score.value,
        "parts": dict(score.parts),
        "reason": score.reason,
        "reward": response.reward,
        **({"process": response.process} if response.process else {}),
        "continues": response.continues,
        "greedy": response.greedy,
    }


def _episode_json(episode: Episode) -> dict[str, Any]:
    return {
        "environment": _places_of_0(episode.sampled),
        "restarts": [[start, list(prefix)] for start, prefix in episode.restarts],
        "messages": episode.messages,
        "counts": episode.counts,
    }


def _episode(values: Mapping[str, Any], count: int) -> Episode:
    environment = set(values["environment"])
    return Episode(
        sampled=tuple(place not in environment for place in range(count)),
        restarts=tuple((start, tuple(prefix)) for start, prefix in values["restarts"]),
        messages=tuple(values["messages"]),
        counts=values["counts"],
    )


def _places_of_0(mask: Sequence[int]) -> list[int]:
    return [place for place, one in enumerate(mask) if not one]


def from_json(values: Mapping[str, Any], prompt: Prompt) -> Group:
    responses = tuple(_response(response) for response in values["responses"])
    return Group(index=values["index"], prompt=prompt, responses=responses)


def _response(values: Mapping[str, Any]) -> Response:
    untrained = set(values["untrained"])
    places = range(len(values["tokens"]))
    completion = Completion(
        tokens=tuple(values["tokens"]),
        logprobs=tuple(values["logprobs"]),
        versions=tuple(version for version, count in values["versions"] for _ in range(count)),
        text=values["text"],
        finish=Finish(values["finish"]),
        episode=_episode(values["episode"], len(places)) if "episode" in values else None,
    )
    return Response(
        completion=completion,
        trainable=tuple(place not in untrained for place in places),
        score=Score(value=values["score"], parts=values["parts"], reason=values["reason"]),
        reward=values["reward"],
        process=tuple((place, reward) for place, reward in values.get("process", ())),
        continues=values["continues"],
        greedy=values["greedy"],
    )
