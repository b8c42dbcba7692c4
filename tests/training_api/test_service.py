"""The training API over HTTP without sockets, on a tiny model: what is computed, sampled, saved and lost."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from calling import DATA, NAME, PROMPT, ROWS, Client, Do, logprobs_of, loss_of, sampled, tiny, training
from torch.nn import functional as F

from plaudit.compute.context import Packed
from plaudit.learn.scorer import Scorer
from plaudit.models.decoder import Decoder
from plaudit.training_api import service, sessions
from plaudit.training_api.adapters import adapted


def by_torch(model: Decoder, rows: Any, weights: Any) -> torch.Tensor:
    """The weighted sum of -log p, without the learner: a row at a time, by torch's own softmax."""
    total = torch.zeros(())
    for row, weight in zip(rows, weights, strict=True):
        tokens = torch.tensor(row)
        logits = model.head(model(tokens[:-1], Packed([len(row) - 1], device="cpu")))
        total = total + (F.cross_entropy(logits, tokens[1:], reduction="none") * torch.tensor(weight)).sum()
    return total


def test_steps_are_those_of_torchs_adamw(do: Do) -> None:
    """Gradients of several calls add up; each step has its own rate, decay and clip."""
    model = adapted(tiny(), 4, 7)
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    async def work(client: Client) -> None:
        name, seq_id = await client.model(), 0
        for rate, clip in ((0.01, 0.0), (0.02, 0.5), (0.0, 0.0)):
            optimizer.zero_grad()
            for data, rows in ((DATA[:2], ROWS[:2]), (DATA[2:], ROWS[2:])):
                expected = by_torch(model, rows, [inputs["weights"] for _, inputs in data])
                expected.backward()
                found = await client.trained(name, seq_id := seq_id + 1, data)
                assert loss_of(found) == pytest.approx(expected.item(), abs=1e-5)
            norm = torch.nn.utils.clip_grad_norm_(own, clip or math.inf)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            adam = {"learning_rate": rate, "weight_decay": 0.1, "grad_clip_norm": clip}
            told = await client.step(name, seq_id := seq_id + 1, **adam)
            assert told["metrics"]["gradient_norm"] == pytest.approx(float(norm), rel=1e-4)
        found = await client.trained(name, seq_id + 1, DATA, forward=True)
        after = by_torch(model, ROWS, [inputs["weights"] for _, inputs in DATA])
        assert loss_of(found) == pytest.approx(after.item(), abs=1e-4)

    do(work)


def test_log_probs_come_back_for_every_datum_in_order(do: Do) -> None:
    async def work(client: Client) -> None:
        name = await client.model()
        found = logprobs_of(await client.trained(name, 1, DATA))
        for row, column in zip(ROWS, found, strict=True):
            logits = (base := tiny()).head(base(torch.tensor(row[:-1]), Packed([len(row) - 1], device="cpu")))
            expected = logits.log_softmax(1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]
            assert column == pytest.approx(expected.detach().numpy(), abs=1e-5)

    do(work)


def test_a_forward_pass_adds_no_gradient(do: Do) -> None:
    async def work(client: Client) -> None:
        name = await client.model()
        await client.trained(name, 1, DATA, forward=True)
        assert (await client.step(name, 2))["metrics"]["gradient_norm"] == 0

    do(work)


def test_a_request_that_comes_twice_is_computed_once(do: Do) -> None:
    async def work(client: Client) -> None:
        name = await client.model()
        await client.trained(name, 1, DATA)
        first = await client.step(name, 2)
        assert await client.step(name, 2) == first
        found = await client.sent("forward_backward", training(name, 1, DATA))
        assert found.json() == {"request_id": f"{name}:1"}
        late = await client.sent("forward_backward", training(name, 0, DATA))
        assert late.status_code == 400 and "not above 2" in late.text

    do(work)


def test_adapters_are_trained_apart_and_in_turn(do: Do) -> None:
    """Two models that are trained side by side end as each does by itself; neither waits for all of the other."""
    steps = 4
    finished: list[str] = []

    async def alone(client: Client, name: str, data: Any) -> list[float]:
        losses = []
        for number in range(steps):
            losses.append(loss_of(await client.trained(name, 2 * number + 1, data)))
            finished.append(name)
            await client.step(name, 2 * number + 2)
        return losses

    async def work(client: Client) -> None:
        session = (await client.told("create_session", {}))["session_id"]
        names = [await client.model(session=session, number=number) for number in range(4)]
        apart = [await alone(client, name, data) for name, data in zip(names[:2], (DATA[:1], DATA[1:]), strict=True)]
        finished.clear()
        both = [alone(client, name, data) for name, data in zip(names[2:], (DATA[:1], DATA[1:]), strict=True)]
        assert await asyncio.gather(*both) == apart
        assert apart[0][-1] < apart[0][0] and apart[1][-1] < apart[1][0]
        for number in range(0, 2 * steps, 2):
            assert {*finished[number : number + 2]} == {*names[2:]}, finished

    do(work)


def test_a_queue_of_one_model_does_not_hold_up_another(do: Do) -> None:
    async def work(client: Client) -> None:
        session = (await client.told("create_session", {}))["session_id"]
        busy, other = [await client.model(session=session, number=number) for number in range(2)]
        for number in range(20):
            await client.told("forward_backward", training(busy, number + 1, DATA))
        await client.trained(other, 1, DATA)
        assert not client.served.sessions.of(busy).futures[f"{busy}:20"].done()

    do(work)


def test_a_sample_is_of_the_weights_at_its_save(do: Do) -> None:
    """Log-probs of samples and of prompts are the policy's; later steps do not change a sampler; a seed repeats."""

    async def work(client: Client) -> None:
        name = await client.model()
        session = name.partition(":")[0]
        base = {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
        before = (await client.told("create_sampling_session", base))["sampling_session_id"]
        await client.trained(name, 1, DATA)
        await client.step(name, 2, learning_rate=0.1)
        body = {"model_id": name, "seq_id": 3, "sampling_session_seq_id": 1}
        saved = (await client.result("save_weights_for_sampler", body))["sampling_session_id"]
        first = await sampled(client, saved, 0)
        await client.trained(name, 4, DATA)
        await client.step(name, 5, learning_rate=0.1)
        again, other = await sampled(client, saved, 1), await sampled(client, before, 0)
        assert again[:2] == first[:2] and other[:2] != first[:2]

        tokens, logprobs, prompt = first
        row = [*PROMPT, *tokens[0]]
        inputs = {"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)}
        path = (await client.result("save_weights", {"model_id": name, "seq_id": 6, "path": "x"}))["path"]
        later = logprobs_of(await client.trained(name, 7, [(row[:-1], inputs)], forward=True))[0]
        assert later[len(PROMPT) - 1 :] != pytest.approx(logprobs[0], abs=1e-3), "other weights"
        body = {"session_id": session, "sampling_session_seq_id": 2, "model_path": path}
        loaded = (await client.told("create_sampling_session", body))["sampling_session_id"]
        tokens, logprobs, prompt = await sampled(client, loaded, 0)
        row = [*PROMPT, *tokens[1]]
        inputs = {"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)}
        same = logprobs_of(await client.trained(name, 8, [(row[:-1], inputs)], forward=True))[0]
        assert same[len(PROMPT) - 1 :] == pytest.approx(logprobs[1], abs=1e-4)
        assert math.isnan(prompt[0]) and prompt[1:] == pytest.approx(same[: len(PROMPT) - 1], abs=1e-4)

    do(work)


def test_a_session_keeps_the_samplers_that_it_uses(do: Do, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "SAMPLERS", 2)

    async def work(client: Client) -> None:
        session = (await client.told("create_session", {}))["session_id"]
        for number in range(3):
            body = {"session_id": session, "sampling_session_seq_id": number, "base_model": NAME}
            await client.told("create_sampling_session", body)
            await sampled(client, f"{session}:sample:0", number)
        gone = await client.sent("asample", ASKED | {"sampling_session_id": f"{session}:sample:1"})
        assert gone.status_code == 404 and "used last" in gone.text

    do(work)


ASKED = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "sampling_params": {}}


def test_only_the_engine_in_use_takes_memory(do: Do, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are cycles of references, and new ones are made faster than Python collects them by itself."""
    freed: list[bool] = []
    monkeypatch.setattr(service, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(service, "give_back_memory", lambda: freed.append(True))

    async def work(client: Client) -> None:
        session, engines = (await client.told("create_session", {}))["session_id"], []
        for number in range(3):
            body = {"session_id": session, "sampling_session_seq_id": number, "base_model": NAME}
            key = (await client.told("create_sampling_session", body))["sampling_session_id"]
            await sampled(client, key, 0)
            engines += [weakref.ref(one) for one in client.served._last._engines.values()]
        assert [one() is None for one in engines] == [True, True, False]
        await asyncio.sleep(0.1)
        assert freed

    gc.disable()
    try:
        do(work)
    finally:
        gc.enable()


def test_prompts_that_wait_are_scored_together(do: Do, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    columns = Scorer.columns
    monkeypatch.setattr(Scorer, "columns", lambda self, batch: passes.append(len(batch)) or columns(self, batch))

    async def work(client: Client) -> None:
        session = (await client.told("create_session", {}))["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
        key = (await client.told("create_sampling_session", body))["sampling_session_id"]
        body = {"sampling_session_id": key, "prompt_logprobs": True, "sampling_params": {"max_tokens": 1}}

        async def scored(number: int, row: tuple[int, ...], **more: int) -> Any:
            prompt = {"prompt": {"chunks": [{"tokens": list(row)}]}, "seq_id": number}
            found = await client.result("asample", body | prompt | more)
            return np.frombuffer(found.prompt_logprobs, np.float32)

        together = await asyncio.gather(*(scored(number, row) for number, row in enumerate(ROWS)))
        assert sum(passes) == len(ROWS) > len(passes)
        for number, row in enumerate(ROWS):
            assert await scored(10 + number, row) == pytest.approx(together[number], abs=1e-5, nan_ok=True)
            last = await scored(20 + number, row, prompt_logprobs_last_n=2)
            assert np.isnan(last[:-2]).all() and last[-2:] == pytest.approx(together[number][-2:], abs=1e-5)

    do(work)


def test_stops_end_an_answer(do: Do) -> None:
    async def work(client: Client) -> None:
        session = (await client.told("create_session", {}))["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
        key = (await client.told("create_sampling_session", body))["sampling_session_id"]
        free, *_ = await sampled(client, key, 0, stop=[], max_tokens=40)
        assert [len(one) for one in free] == [40, 40]
        place = next(place for place, one in enumerate(free[0]) if place > 3 and one not in free[0][:place])
        by_token, *_ = await sampled(client, key, 1, stop=[free[0][place]], max_tokens=40)
        by_text, *_ = await sampled(client, key, 2, stop=f"w{free[0][place]}", max_tokens=40)
        assert by_token[0] == free[0][: place + 1]
        assert by_text[0][:place] == free[0][:place] and len(by_text[0]) <= place + 2

    do(work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_goes_on_where_it_was_saved(do: Do, dtype: torch.dtype) -> None:
    """A model made of a save continues as the one that was saved; without its optimizer it does not."""

    async def work(client: Client) -> None:
        name = await client.model()
        await client.trained(name, 1, DATA)
        await client.step(name, 2)
        path = (await client.result("save_weights", {"model_id": name, "seq_id": 3, "path": "one"}))["path"]
        assert path == f"tinker://{name}/weights/one"
        about = await client.told("weights_info", {"tinker_path": path})
        assert (about["base_model"], about["lora_rank"], about["train_unembed"]) == (NAME, 4, False)

        async def onwards(model: str, seq_id: int) -> list[float]:
            losses = []
            for number in range(seq_id, seq_id + 6, 2):
                losses.append(loss_of(await client.trained(model, number, DATA)))
                await client.step(model, number + 1)
            return losses

        expected = await onwards(name, 4)
        made = {"session_id": name.partition(":")[0], "path": path}
        with_state = (await client.result("load_weights", made | {"model_seq_id": 1, "optimizer": True}))["model_id"]
        assert await onwards(with_state, 1) == expected
        without = (await client.result("load_weights", made | {"model_seq_id": 2, "optimizer": False}))["model_id"]
        found = await onwards(without, 1)
        assert found[0] == expected[0] and found[-1] != expected[-1]
        body = {"model_id": name, "seq_id": 10, "path": path, "optimizer": True}
        await client.result("load_weights", body)
        assert await onwards(name, 11) == expected
        refused = await client.result("save_weights", {"model_id": name, "seq_id": 20, "path": "one"})
        assert "overwrite=True" in refused["error"] and refused["category"] == "user"

    do(work, base=tiny(dtype))


def test_a_model_of_a_save_that_does_not_fit_takes_no_place(do: Do) -> None:
    async def work(client: Client) -> None:
        name = await client.model()
        saved = {"model_id": name, "seq_id": 1, "path": "x"}
        path = (await client.result("save_weights_for_sampler", saved))["path"]
        body = {"session_id": name.partition(":")[0], "model_seq_id": 1, "path": path}
        refused = await client.result("load_weights", body | {"optimizer": True})
        assert "no optimizer's state" in refused["error"]
        assert "error" not in await client.result("load_weights", body | {"model_seq_id": 2, "optimizer": False})

    do(work, models=2)


def test_a_model_of_a_samplers_save_goes_on_after_a_restart(do: Do) -> None:
    """Such a save has no optimizer's state to go on with."""
    made: list[str] = []

    async def first(client: Client) -> None:
        name = await client.model()
        saved = {"model_id": name, "seq_id": 1, "path": "x"}
        path = (await client.result("save_weights_for_sampler", saved))["path"]
        body = {"session_id": name.partition(":")[0], "model_seq_id": 1, "path": path, "optimizer": False}
        made.append((await client.result("load_weights", body))["model_id"])
        await client.step(made[0], 1)

    async def second(client: Client) -> None:
        await client.served.open()
        await client.trained(made[0], 2, DATA)
        assert (await client.step(made[0], 3))["metrics"]["steps_lost"] == 1

    do(first)
    do(second)


def test_a_killed_servers_models_go_on_from_their_last_save(do: Do) -> None:
    names: list[str] = []
    lost: list[float] = []

    async def first(client: Client) -> None:
        session = (await client.told("create_session", {}))["session_id"]
        names.extend([await client.model(session=session, number=number) for number in range(2)])
        for name in names:
            await client.trained(name, 1, DATA)
            await client.step(name, 2)
        await client.result("save_weights", {"model_id": names[0], "seq_id": 3, "path": "one"})
        lost.append(loss_of(await client.trained(names[0], 4, DATA)))
        await client.step(names[0], 5)
        lost.append(loss_of(await client.trained(names[0], 6, DATA)))

    async def second(client: Client) -> None:
        said: list[str] = []
        client.served.say = said.append
        await client.served.open()
        assert f"{names[0]} goes on from tinker://{names[0]}/weights/one (step 1); 1 later steps are lost" in said
        assert f"{names[1]} goes on from its start, as it was never saved (step 0); 1 later steps are lost" in said
        gone = await client.sent("retrieve_future", {"request_id": f"{names[0]}:5"})
        assert gone.status_code == 404 and "last save" in gone.text
        await client.told("session_heartbeat", {"session_id": names[0].partition(":")[0]})
        assert loss_of(await client.trained(names[0], 4, DATA)) == lost[0]
        assert (await client.step(names[0], 5))["metrics"]["steps_lost"] == 1
        assert loss_of(await client.trained(names[0], 6, DATA)) == lost[1]
        assert "steps_lost" not in (await client.step(names[0], 7))["metrics"]

    async def another(client: Client) -> None:
        client.served.name = "another"
        await client.served.open()
        assert not client.served.sessions.all
        refused = await client.sent("weights_info", {"tinker_path": f"tinker://{names[0]}/weights/one"})
        assert refused.status_code == 404 and f"no base model '{NAME}'" in refused.text

    do(first)
    do(another)
    do(second)


def test_a_session_that_is_finished_frees_its_places(do: Do) -> None:
    async def work(client: Client) -> None:
        name = await client.model()
        session = name.partition(":")[0]
        await client.told(f"sessions/{session}/finish", {"reason": {"type": "success"}})
        assert (await client.sent("session_heartbeat", {"session_id": session})).status_code == 410
        assert await client.model() != name

    do(work, models=1)


def test_a_client_that_goes_away_frees_its_places(do: Do, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(sessions.time, "monotonic", lambda: now[0])

    async def work(client: Client) -> None:
        name = await client.model()
        session = (await client.told("create_session", {}))["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 2}}
        full = await client.sent("create_model", body)
        assert full.status_code == 400 and "1 models in training" in full.text
        now[0] = 50.0
        await client.told("session_heartbeat", {"session_id": session})
        now[0] = 70.0
        assert (await client.result("create_model", body))["model_id"] == f"{session}:train:0"
        late = await client.sent("forward_backward", training(name, 1, DATA))
        assert late.status_code == 410 and "60 s after" in late.text
        assert not list(client.served.folder.glob(f"{name}/model.json")), "a later server does not go on with it"

    do(work, models=1)


def test_a_loss_that_is_not_finite_adds_nothing(do: Do) -> None:
    async def work(client: Client) -> None:
        name = await client.model()
        tokens, inputs = DATA[0]
        huge = {"target_tokens": inputs["target_tokens"], "logprobs": [-3e38] * 4, "advantages": [1.0] * 4}
        told = await client.trained(name, 1, [(tokens, huge)], "importance_sampling")
        assert "not finite" in told["error"] and told["category"] == "user"
        assert (await client.step(name, 2))["metrics"]["gradient_norm"] == 0

    do(work)
