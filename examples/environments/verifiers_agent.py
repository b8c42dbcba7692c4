"""Tasks of the library verifiers (v1): its harness plays one against the policy, and its reward is the episode's.

    pip install verifiers==0.4.0 uv     in an environment of its own: it wants openai below 3

The harness `null` is a chat without tools, in a process of its own. For the first task, uv installs what that needs.
Give another harness or runtime below.
"""

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.harnesses import NullHarnessConfig
from verifiers.v1.runtimes import SubprocessConfig


class QuestionData(vf.TaskData):
    answer: str


class Question(vf.Task[QuestionData]):
    """A question whose answer is the reply's last number. A task of an installed taskset plays as well."""

    @vf.reward
    async def right(self, task: QuestionData, trace: vf.Trace) -> float:
        return float(re.findall(r"-?\d+", trace.last_reply)[-1:] == [task.answer])

    @vf.metric
    async def words(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply.split()))


async def solve(base_url: str, api_key: str, messages: list[Any], answer: str) -> dict[str, float]:
    """Return the trace's reward and metrics."""
    with seat(base_url, api_key) as agent:
        return worth(await agent.run(Question(QuestionData(prompt=messages, answer=answer))))


@contextlib.contextmanager
def seat(base_url: str, api_key: str) -> Iterator[vf.Agent]:
    """Give the agent whose model is the policy. Its client reads the key from the environment only."""
    name = f"EPISODE_API_KEY_{uuid.uuid4().hex}"
    os.environ[name] = api_key
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=name)
    harness, runtime = NullHarnessConfig(id="null"), SubprocessConfig()
    try:
        yield vf.make_agent(vf.AgentConfig(model="policy", client=client, harness=harness, runtime=runtime))
    finally:
        del os.environ[name]


def worth(trace: vf.Trace) -> dict[str, float]:
    """Return what a trace earned. Raises RuntimeError for one that failed, so that its episode fails too."""
    if not trace.ok:
        raise RuntimeError(f"{trace.stop_condition}: {trace.errors[-1].message if trace.errors else 'no error'}")
    return {"reward": trace.reward, **{name: one for name, one in trace.metrics.items() if one is not None}}
