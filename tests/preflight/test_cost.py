"""Seconds and bytes of placed runs: by hand, and beside the loop itself on a clock that jumps."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import overlap
import pytest
import yaml
from overlap import Case

from plaudit.preflight import stages
from plaudit.preflight.cost import Costs
from plaudit.preflight.placement import Apart, Placement, heuristic, placement_of, placements, symmetric
from plaudit.preflight.profile import Curve, Link, Profile
from plaudit.preflight.report import Outcome
from plaudit.settings.checks import wrong
from plaudit.settings.recipes import read_settings
from plaudit.settings.tree import Settings

GPT2 = "{model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 2, n_positions: 128, vocab_size: 100}"
MESH = "runtime.mesh={context: 2, tensor: 2}"
NOTHING = Curve((0.0,) * 4, (0.0,) * 4)


def flat(seconds: float) -> Curve:
    """So many seconds a token."""
    return Curve((0.0, seconds, 0.0, 0.0), (0.0, seconds, 0.0, 0.0))


def profile(**changes: Any) -> Profile:
    given: dict[str, Any] = {
        "hardware": "made up",
        "devices": 8,
        "gpu": True,
        "capacity": 1e9,
        "passes": {"policy/train": flat(0.01), "policy/score": NOTHING, "reference/score": flat(0.002)}
        | {"critic/train": flat(0.02), "critic/score": flat(0.003), "judge 0/score": flat(0.005)},
        "updates": {"policy": 0.5, "critic": 0.25},
        "decode": Curve((0.1, 0.0, 0.0, 0.0), (0.1, 0.0, 0.0, 0.0)),
        "links": {name: Link(0.0, 1e6) for name in ("all_reduce", "all_gather", "store")},
        "call": 0.0,
        "prompts": (10,),
        "answers": (20,),
    }
    return Profile(**given | changes)


def settings(*words: str, method: str = "ppo") -> Settings:
    sizes = ["rollout.prompts_per_step=8", "rollout.max_tokens=20", f"model.config={GPT2}", "algorithm.minibatches=2"]
    return read_settings(None, [*(sizes if method == "ppo" else sizes[:3]), *words], method=method)


def test_calls_of_a_step_by_hand() -> None:
    """Eight rows of 10 + 20 tokens: 240. Two mini-batches, each with an optimizer step."""
    found = Costs(settings(), profile(), 1).estimate(Placement(threads=1))
    assert found.calls == pytest.approx(
        {
            "generate": 20 * 0.1,
            "reference scores": 240 * 0.002,
            "critic scores": 240 * 0.003,
            "policy trains": 240 * 0.01 + 2 * 0.5,
            "critic trains": 240 * 0.02 + 2 * 0.25,
        }
    )
    assert found.step == pytest.approx(sum(found.calls.values()))
    assert found.idle == pytest.approx(0)


def test_ranks_share_the_batch_and_add_up_gradients() -> None:
    one, two = (Costs(settings(), profile(), 4).calls(Placement(ray=True, ranks=n, workers=1)) for n in (1, 2))
    assert two["reference scores"] == one["reference scores"] / 2
    numbers = Costs(settings(), profile(), 4).policy.parameters
    summed = 2 * 4 * numbers / 1e6  # two updates; a ring of two sends each gradient once
    assert two["policy trains"] == pytest.approx(240 * 0.01 / 2 + 2 * 0.5 + summed)
    assert two["publish"] == pytest.approx(4 * numbers / 1e6)


def test_a_sum_crosses_the_network_where_its_ranks_are_on_several_machines() -> None:
    """Machines of 2 devices. Ranks of one row are neighbours: 2 of a tensor group are on one machine, while the same
    matrix's gradients are summed over both machines."""
    links = {"all_reduce": Link(0.0, 1e9), "all_gather": Link(0.0, 1e9), "store": Link(0.0, 1e9)}
    slow = links | {"network": Link(0.0, 1e6)}
    at = Placement(ray=True, ranks=2, tensor=2, workers=0)

    def seconds(links: dict[str, Link], of: Placement) -> dict[str, float]:
        return dict(Costs(settings(), profile(devices=2, links=links), 4).calls(of))

    fast, found = seconds(links, at), seconds(slow, at)
    numbers = Costs(settings(), profile(), 4).policy.parameters
    summed = 2 * 4 * numbers / 2  # bytes: two updates of half of the weights, a ring of two
    assert found["policy trains"] - fast["policy trains"] == pytest.approx(summed / 1e6 - summed / 1e9, rel=0.02)
    assert found["reference scores"] == fast["reference scores"], "a row's activations stay on a machine"
    wide = Placement(ray=True, ranks=1, tensor=4, workers=0)
    assert seconds(slow, wide)["reference scores"] > 2 * seconds(links, wide)["reference scores"]
    staged = Placement(ray=True, stages=2, workers=0)
    assert seconds(slow, staged)["reference scores"] == seconds(links, staged)["reference scores"]
    hidden = 4 * 32 * 240  # bytes between machines of a device: 240 hidden states of 32 float32 numbers
    here, far = (Costs(settings(), profile(devices=1, links=one), 4).calls(staged) for one in (links, slow))
    more = far["reference scores"] - here["reference scores"]
    assert more == pytest.approx(hidden / 1e6 - hidden / 1e9)


@pytest.mark.parametrize("words", [(), ("rollout.max_lag=1",)])
@pytest.mark.parametrize("cores", [2, 4])
def test_no_placement_promises_more_than_the_cores_can_do(cores: int, words: tuple[str, ...]) -> None:
    """The least that a step takes is one thread's work, spread evenly: rewards too, which the driver computes beside
    rollout workers that keep every core busy."""
    rows, free = Curve((0.0, 0.05, 0.0, 0.0), (0.0, 0.05, 0.0, 0.0)), {"policy": 0.0, "critic": 0.0}
    made = profile(gpu=False, devices=cores, decode=rows, updates=free, rewards={"r": (0.0, 0.25)})
    costs = Costs(settings(*words), made, cores)
    least = sum(costs.calls(Placement(threads=1)).values()) / cores
    found = placements(costs.settings, costs.policy, cores, gpu=False, lags=(0, 1) if words else (0,))
    early = [(str(at), step) for at in found if (step := costs.estimate(at).step) < 0.999 * least]
    assert not early, f"least {least} s"


def test_lag_hides_the_shorter_side() -> None:
    costs = Costs(settings(), profile(), 4)
    sync, ahead = (costs.estimate(Placement(ray=True, workers=1, lag=lag)) for lag in (0, 1))
    learn = sum(seconds for name, seconds in sync.calls.items() if name.endswith((" scores", " trains")))
    assert sync.step == pytest.approx(2.0 + learn + sync.calls["publish"])
    assert ahead.step == pytest.approx(learn + ahead.calls["publish"])
    assert ahead.idle < sync.idle


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("workers", [1, 4])
def test_a_step_is_that_of_the_real_loop(lag: int, workers: int) -> None:
    """`benchmarks/overlap.py` plays the loop's own source, pool and workers; learning takes as long as generating with
    every slot busy."""
    chance = random.Random(0)
    lengths = [max(8, min(400, round(chance.lognormvariate(4.0, 0.6)))) for _ in range(200)]
    played = overlap.run(Case(workers, lag, True, lengths))
    per_step, learn = workers * overlap.SLOTS // overlap.SAMPLES, overlap.mean(lengths) * overlap.TOKEN_SECONDS
    words = [f"rollout.prompts_per_step={per_step}", "rollout.max_tokens=400", f"algorithm.samples={overlap.SAMPLES}"]
    made = profile(
        passes={"policy/train": NOTHING, "policy/score": NOTHING},
        updates={"policy": learn},
        decode=Curve((overlap.TOKEN_SECONDS, 0.0, 0.0, 0.0), (overlap.TOKEN_SECONDS, 0.0, 0.0, 0.0)),
        links={"all_reduce": Link(0, 1e12), "all_gather": Link(0, 1e12), "store": Link(0, 1e12)},
        answers=tuple(lengths),
        prompts=(1,),
    )
    slots = [f"rollout.slots={overlap.SLOTS}", "rollout.max_lag=" + str(lag)]
    costs = Costs(settings(*words, *slots, method="grpo"), made, workers + 1)
    found = costs.estimate(Placement(ray=True, workers=workers, lag=lag))
    assert found.step == pytest.approx(played.seconds, rel=0.2)


def test_memory_by_hand() -> None:
    """Float32 and AdamW: 4 + 4 + 8 bytes a trained weight; policy and critic are trained, the reference is frozen."""
    costs = Costs(settings(), profile(memory={"process": 1e6, "token": 100.0}), 1)
    numbers, critic = (one.numbers(one.layout.mesh.place(0))[1] for one in costs.models[:2])
    (run,) = costs.memory(Placement()).values()
    assert run["process"] == 1e6
    assert run["weights"] == 4 * (numbers + critic + numbers)
    assert run["gradients"] == 4 * (numbers + critic)
    assert run["moments"] == 8 * (numbers + critic)
    assert run["activations"] == 100 * 240 / 2
    assert run["cache"] == 8 * 30 * 2 * 2 * 4 * 32


def test_a_publish_sends_all_weights_or_the_adapters_alone() -> None:
    """LoRA of rank 4 on 32 x 96 numbers in each of two layers: 4 x (32 + 96) float32 numbers each."""
    whole = Costs(settings(), profile(), 8)
    size = 4 * whole.policy.parameters
    assert whole.calls(Placement(ray=True, workers=1))["publish"] == pytest.approx(size / 1e6)
    words = ("model.lora.rank=4", "model.lora.targets=[c_attn]")
    adapters = Costs(settings(*words), profile(), 8)
    assert adapters.calls(Placement(ray=True, workers=1))["publish"] == pytest.approx(2 * 4 * 4 * 128 / 1e6)


def test_ray_adds_its_own_bytes_to_each_process() -> None:
    costs = Costs(settings(), profile(memory={"process": 1e6, "ray": 5e5}), 8)
    kinds = costs.memory(Placement(ray=True, workers=1))
    assert {parts["process"] for parts in kinds.values()} == {1.5e6}
    assert costs.memory(Placement())["run"]["process"] == 1e6


def test_sharding_takes_less_of_each_rank() -> None:
    costs = Costs(settings(), profile(), 4)
    whole, sharded = (
        costs.memory(Placement(ray=True, ranks=4, sharded=which, workers=1))["rank"] for which in (False, True)
    )
    assert sharded["moments"] == pytest.approx(whole["moments"] / 4, rel=0.05)
    assert sharded["gathered"] > whole["gathered"] == 0


def test_a_context_axis_divides_passes_and_activations() -> None:
    """Two heads of 16, and as many keys: 2 layers exchange 64 numbers of 240 tokens, there and back, forwards."""
    costs = Costs(settings(), profile(memory={"token": 100.0}), 4)
    one, two = (Placement(ray=True, context=size, workers=1) for size in (1, 2))
    calls = costs.calls(two)
    sent = 4 * 64 * 2 * 240 / 2 / 2
    assert calls["reference scores"] == pytest.approx(costs.calls(one)["reference scores"] / 2 + 2 * sent / 1e6)
    ranks = [costs.memory(at)["rank"] for at in (one, two)]
    assert ranks[1]["activations"] == ranks[0]["activations"] / 2
    assert ranks[1]["weights"] == ranks[0]["weights"]


def test_a_critic_starts_from_a_judge_of_the_same_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(yaml.safe_load(GPT2) | {"n_embd": 64}))
    costs = Costs(settings(f"rewards=[{{kind: judge, path: {tmp_path}}}]"), profile(), 1)
    assert costs.config_of("critic").width == costs.config_of("judge 0").width == 64
    assert costs.policy.width == 32
    assert costs.calls(Placement())["judge 0"] == pytest.approx(240 * 0.005)


def test_settings_and_placements_are_the_same_said_twice() -> None:
    given = settings("runtime=ray", "runtime.num_training_workers=2", "rollout.workers=3", MESH)
    at = placement_of(given, 16, gpu=True)
    assert at == Placement(ray=True, ranks=2, tensor=2, context=2, workers=3)
    again = read_settings(None, at.words(), method="ppo")
    assert placement_of(again, 8, gpu=True) == at
    assert placement_of(at.placed(settings()), 8, gpu=True) == at


def test_models_on_ranks_of_their_own_do_not_wait_for_others() -> None:
    """Three groups: scores take the reference's on two ranks or the critic's, training the policy's or the critic's."""
    costs = Costs(settings(), profile(), 8)
    apart = (Apart(("critic",)), Apart(("reference",), ranks=2))
    together, own = (costs.estimate(Placement(ray=True, workers=1, apart=one)) for one in ((), apart))
    policy, critic = 240 * 0.01 + 2 * 0.5, 240 * 0.02 + 2 * 0.25
    rest = 2.0 + own.calls["publish"]
    assert together.step == pytest.approx(240 * 0.002 + 240 * 0.003 + policy + critic + rest)
    assert own.step == pytest.approx(max(120 * 0.002, 240 * 0.003) + max(policy, critic) + rest)
    busy = 2.0 + 2 * 120 * 0.002 + 240 * 0.003 + policy + critic
    assert own.idle == pytest.approx(1 - busy / (5 * own.step))
    assert own.memory["rank"]["moments"] + own.memory["critic rank"]["moments"] == together.memory["rank"]["moments"]
    assert own.memory["reference rank"]["moments"] == 0
    said = read_settings(None, own.placement.words(), method="ppo")
    assert placement_of(said, 8, gpu=True) == own.placement
    both = placement_of(
        settings("runtime=ray", "runtime.placement={critic: {mesh: {tensor: 2}}, reference: {inside: critic}}"),
        8,
        gpu=True,
    )
    assert both.apart == (Apart(("critic", "reference"), tensor=2),)
    assert placement_of(both.placed(settings()), 8, gpu=True) == both


def test_every_placement_fits_the_devices_and_the_usual_ones_are_among_them() -> None:
    given = settings()
    found = list(placements(given, Costs(given, profile(), 8).policy, 8, gpu=True, lags=(0,)))
    assert len(found) == len(set(found))
    assert all(one.devices <= 8 for one in found)
    assert {one.apart[0].roles for one in found if one.apart} == {("critic",), ("reference",), ("critic", "reference")}
    assert {one.tensor for one in found} == {1, 2}, "the model has two heads"
    now = Placement()
    assert symmetric(found, now) == Placement(ray=True, ranks=8, workers=8, shared=True)
    by_hand = heuristic(found, now)
    assert by_hand == Placement(ray=True, ranks=4, workers=4)
    assert replace(by_hand, lag=1) not in found


@pytest.mark.parametrize(
    ("count", "spans", "parts"), [(2, 1, 1), (2, 1, 8), (4, 1, 4), (4, 1, 200), (2, 2, 8), (4, 3, 8)]
)
def test_stages_wait_for_the_bubble(count: int, spans: int, parts: int) -> None:
    """Two seconds a micro-batch on a stage: the stages work for 2 M, and wait for (P - 1) / (V M + P - 1) of all."""
    for trains in (True, False):
        found = stages.seconds(count, spans, parts, 2.0, 0.0, 0.0, trains=trains)
        bubble = (count - 1) / (spans * parts + count - 1)
        assert found == pytest.approx(2.0 * parts / (1 - bubble))


def test_a_head_and_messages_between_stages_by_hand() -> None:
    """A micro-batch of two: 1 s forwards and 2 s backwards on a stage's layers, 3 s on the head, 0.5 s a message."""
    assert stages.seconds(2, 1, 1, 3.0, 3.0, 0.5, trains=False) == pytest.approx(3.0 + 0.5 + 3.0 + 3.0)
    assert stages.seconds(2, 1, 1, 3.0, 3.0, 0.5, trains=True) == pytest.approx(1 + 0.5 + 2 + 4 + 0.5 + 2)
    # The second one's forward pass on the first stage is done while the last stage works, which then never waits.
    assert stages.seconds(2, 1, 2, 3.0, 3.0, 0.5, trains=True) == pytest.approx(1 + 0.5 + 2 + 4 + 2 + 4 + 0.5 + 2)


@pytest.mark.parametrize(("stage", "spans", "parts", "found"), [(0, 1, 8, 4), (3, 1, 8, 1), (0, 1, 2, 2), (3, 2, 8, 5)])
def test_passes_that_wait_for_their_backward_pass(stage: int, spans: int, parts: int, found: int) -> None:
    """Of four stages the first has four micro-batches under way, the last one; with two spans all of a round more."""
    assert stages.under_way(4, spans, parts, stage) == found


def test_calls_of_stages_by_hand() -> None:
    """240 tokens in two mini-batches of 120, cut at 60: two micro-batches each. A link takes 0.25 s a message. Scores
    are of two passes."""
    links = {name: Link(0.25, 1e12) for name in ("all_reduce", "all_gather", "store")}
    found = Costs(settings("learn.micro_tokens=60"), profile(links=links), 4).calls(Placement(ray=True, stages=2))
    # 0.1 s forwards and 0.2 s backwards on a stage. The last one works from 0.35 to 0.95; the first one gets
    # the second gradient at 1.2.
    update = 0.5 * FIRST / (FIRST + LAST - EMBEDDING)
    assert found["policy trains"] == pytest.approx(2 * (1.4 + update + 0.25)), "0.25: the tied embedding's gradient"
    assert found["reference scores"] == pytest.approx(0.12 + 0.25 + 2 * 0.12), "0.12 s of a pass on a stage"


EMBEDDING, LAYER = 100 * 32, 12 * 32**2 + 13 * 32
FIRST, LAST = EMBEDDING + 128 * 32 + LAYER, LAYER + 64 + EMBEDDING
"""Numbers of the policy on two stages: the tied embedding is on both."""


def test_memory_of_stages_by_hand() -> None:
    costs = Costs(settings("learn.micro_tokens=60", method="grpo"), profile(), 4)
    at = Placement(ray=True, stages=2)
    found, plain = costs.estimate(at), costs.estimate(Placement(ray=True)).memory["rank"]
    first, last = (found.memory[f"rank of stage {number}"] for number in (0, 1))
    assert (first["gradients"], last["gradients"]) == (4 * FIRST, 4 * LAST)
    assert plain["gradients"] == 4 * (FIRST + LAST - EMBEDDING)
    assert first["activations"] == plain["activations"], "half of the layers, of two micro-batches"
    assert last["activations"] == plain["activations"] / 2, "of one"
    assert at.counts == {"rank of stage 0": 1, "rank of stage 1": 1, "rollout worker": 1}
    assert found.total == sum(sum(parts.values()) for parts in found.memory.values())


def test_placements_of_a_method_that_learns_from_data_can_run() -> None:
    s = settings(method="sft")
    found = [at for at in placements(s, Costs(s, profile(), 4).policy, 4, gpu=True, lags=(0,)) if at.ray]
    assert found
    refused = [*wrong(s)]
    for at in found:
        assert [*wrong(at.placed(s))] == refused, at
        assert "rollout.workers" not in at.overrides()


def test_stages_of_the_recipe_are_planned_and_left_out() -> None:
    s = settings("runtime=ray", "runtime.mesh={pipeline: 2}")
    costs = Costs(s, profile(), 4)
    now = placement_of(s, 4, gpu=True)
    assert (now.stages, now.trains_on, now.devices, now.mesh) == (2, 2, 3, {"pipeline": 2})
    found = [*placements(s, costs.policy, 4, gpu=True, lags=(0,))]
    assert now in found
    assert {one.stages for one in found} == {1, 2}
    assert all(one.devices <= 4 for one in found)
    assert now.placed(s).runtime.pipeline == 2
    outcome = Outcome(costs, 0.0)
    assert "runtime.mesh={}" in outcome._changed(Placement(ray=True))
    (staged,) = [one for one in found if one == replace(now, workers=2)]
    assert costs.estimate(staged).step > 0
