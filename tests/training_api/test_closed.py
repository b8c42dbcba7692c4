"""Who is served by the training API, and what is refused: keys, limits, fields, and thousands of odd requests."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from calling import DATA, NAME, PROMPT, Client, Do, Work, logprobs_of, service, training

from plaudit.training_api import sessions

TOKEN = "tml-0123456789abcdef"


def test_only_clients_with_the_key_are_served(words: Any, tmp_path: Path) -> None:
    async def work() -> None:
        served = service(words, tmp_path)
        for headers, status in (
            ({}, 401),
            ({"x-api-key": "tml-wrong"}, 401),
            ({"x-api-key": TOKEN}, 200),
            ({"authorization": f"Bearer {TOKEN}"}, 200),
            ({"x-api-key": TOKEN, "authorization": "Bearer other"}, 401),
            ({"x-api-key": TOKEN, "origin": "http://evil.example"}, 403),
            ({"x-api-key": TOKEN, "host": "evil.example"}, 403),
        ):
            client = Client(served, TOKEN, **headers)
            assert (await client.sent("create_session", {})).status_code == status, headers
        assert len(served.sessions.all) == 2

    asyncio.run(work())


REFUSED: list[tuple[str, Any, str]] = [
    ("create_model", {"session_id": "S", "base_model": "other", "lora_config": {}}, "other"),
    ("create_model", {"session_id": "S", "base_model": NAME, "lora_config": {"rank": 0}}, "rank=0 must be at least 1"),
    ("create_model", {"session_id": "S", "base_model": NAME, "lora_config": {"train_mlp": False}}, "train_mlp=false"),
    ("create_model", {"session_id": "S", "base_model": NAME}, "lora_config is null"),
    ("create_model", {"session_id": "S", "lora_config": {}, "optimizer_config": {"type": "dimuon"}}, "dimuon"),
    ("create_model", {"session_id": "none", "lora_config": {}}, "no session"),
    ("optim_step", {"model_id": "M", "seq_id": 1, "adam_params": {"learning_rate": -1}}, "learning_rate=-1"),
    ("optim_step", {"model_id": "M", "seq_id": 1, "optimizer_params": {}}, "optimizer_params.* not served"),
    ("save_weights", {"model_id": "M", "seq_id": 1, "path": "../../x"}, "no name of a save"),
    ("load_weights", {"model_id": "M", "path": "tinker://../weights/x"}, "no save"),
    ("weights_info", {"tinker_path": "/etc/passwd"}, "no save"),
    ("save_weights_for_sampler", {"model_id": "M", "kind": "inflight"}, "inflight"),
    ("create_custom_loss", {}, "Not Found"),
    ("asample", {"sampling_session_id": "P", "topk_prompt_logprobs": 3}, "topk_prompt_logprobs=3"),
    ("asample", {"sampling_session_id": "P", "record_stability_info": True}, "record_stability_info"),
    ("asample", {"sampling_session_id": "P", "num_samples": 10**6}, "num_samples"),
    ("asample", {"sampling_session_id": "P", "sampling_params": {"temperature": 0.001}, "prompt": "T"}, "0.01"),
    ("asample", {"sampling_session_id": "P", "sampling_params": {"stop": [""]}, "prompt": "T"}, "stop="),
    (
        "asample",
        {"sampling_session_id": "P", "sampling_params": {}, "prompt": {"chunks": [{"data": ""}]}},
        "encoded_text",
    ),
]


def test_what_is_not_served_is_refused_by_name(do: Do) -> None:
    async def work(client: Client) -> None:
        name = await client.model()
        body = {"session_id": name.partition(":")[0], "base_model": NAME}
        sampler = (await client.told("create_sampling_session", body))["sampling_session_id"]
        prompt = {"chunks": [{"tokens": PROMPT}]}
        real = {"S": name.partition(":")[0], "M": name, "P": sampler, "T": prompt}
        for path, sent, says in REFUSED:
            filled = {
                field: real.get(value, value) if isinstance(value, str) else value for field, value in sent.items()
            }
            response = await client.sent(path, filled)
            assert 400 <= response.status_code < 500, (path, sent, response.text)
            assert re.search(says, response.json()["error"]), (path, sent, response.text)
        assert logprobs_of(await client.trained(name, 1, DATA)), "the model is as it was"

    do(work)


def test_no_id_leads_out_of_the_folder(do: Do, tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        session = (await client.told("create_session", {}))["session_id"]
        name = await client.model(session=f"{session}:../../out")
        assert name == f"{session}:train:0"
        path = (await client.result("save_weights", {"model_id": name, "seq_id": 1, "path": "x"}))["path"]
        assert path == f"tinker://{name}/weights/x"
        assert [one.name for one in tmp_path.iterdir()] == [name]

    do(work)


def fuzzed(chance: random.Random, value: Any) -> Any:
    """A value that may take the place of a right one."""
    odd = [None, True, -1, 0, 1, 2**63, 10**400, 1e308, float("inf"), "", "x" * 300, "\ud800", [], {}, [[]], {"a": {}}]
    roll = chance.random()
    if roll < 0.06:
        return chance.choice(odd)
    if isinstance(value, dict):
        return {key: fuzzed(chance, one) for key, one in value.items() if chance.random() > 0.02}
    if isinstance(value, list):
        return [fuzzed(chance, one) for one in value for _ in range(chance.choice((1, 1, 2)))]
    return value


def fuzz(count: int) -> Work:
    """Work that sends `count` requests, each a right one with something changed, then a right one."""

    async def work(client: Client) -> None:
        chance, name = random.Random(count), await client.model()
        session = name.partition(":")[0]
        key = {"session_id": session, "base_model": NAME}
        sampler = (await client.told("create_sampling_session", key))["sampling_session_id"]
        prompt, draw = {"chunks": [{"tokens": PROMPT}]}, {"max_tokens": 2, "stop": ["a"], "top_k": 3}
        right: dict[str, Any] = {
            "client/config": {},
            "session_heartbeat": {"session_id": session},
            "create_model": {
                **key,
                "model_seq_id": 1,
                "lora_config": {"rank": 2},
                "optimizer_config": {"type": "adamw"},
            },
            "get_info": {"model_id": name},
            "optim_step": {"model_id": name, "seq_id": 1, "adam_params": {"learning_rate": 0.0}},
            "save_weights": {"model_id": name, "seq_id": 1, "path": "x", "overwrite": True},
            "save_weights_for_sampler": {"model_id": name, "seq_id": 1, "sampling_session_seq_id": 3},
            "load_weights": {"model_id": name, "seq_id": 1, "path": f"tinker://{name}/weights/x", "optimizer": True},
            "weights_info": {"tinker_path": f"tinker://{name}/weights/x"},
            "create_sampling_session": {**key, "sampling_session_seq_id": 3},
            "asample": {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": draw},
            "retrieve_future": {"request_id": f"{name}:create"},
            "forward_backward": b"",
        }
        taken = 0
        for number in range(count):
            path = chance.choice([*right])
            body = right[path]
            if isinstance(body, dict) and "seq_id" in body:
                body = {**body, "seq_id": number + 1}
            if isinstance(body, bytes):
                flat = bytearray(training(name, number + 1, DATA))
                for _ in range(chance.randrange(4)):
                    flat[chance.randrange(len(flat))] = chance.randrange(256)
                body = bytes(flat)[: chance.choice((len(flat), chance.randrange(len(flat))))]
                sent = client.http.post(path, content=body, headers={"content-type": "application/x-protobuf"})
            else:
                text = json.dumps(fuzzed(chance, body))
                text = text[: chance.randrange(len(text) + 1)] if chance.random() < 0.1 else text
                sent = client.http.post(path, content=text, headers={"content-type": "application/json"})
            response = await sent
            assert response.status_code < 500, (number, path, body, response.text)
            assert response.status_code == 200 or response.json()["error"], response.text
            taken += response.status_code == 200
            if response.status_code == 200 and "request_id" in response.json():
                await client.sent("retrieve_future", {"request_id": response.json()["request_id"]})
        assert count / 4 < taken < count * 3 / 4, taken
        last = client.served.sessions.model(name).last
        assert logprobs_of(await client.trained(name, last + 1, DATA, forward=True))[0].size == 4

    return work


def test_odd_requests_are_answered(do: Do) -> None:
    do(fuzz(400))


@pytest.mark.slow
def test_many_odd_requests_are_answered(do: Do) -> None:
    do(fuzz(10_000))


def test_a_room_has_an_end(do: Do, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "WAITING", 3)
    monkeypatch.setattr(sessions, "SESSIONS", 2)

    async def work(client: Client) -> None:
        name = await client.model()
        await client.told("create_session", {})
        assert (await client.sent("create_session", {})).status_code == 429
        for number in (1, 2):
            await client.told("forward_backward", training(name, number, DATA))
        full = await client.sent("forward_backward", training(name, 3, DATA))
        assert full.status_code == 429 and "retrieve some first" in full.text

    do(work)
