"""A client of the training API without sockets: requests as tinker 0.38 sends them, and a service on a tiny model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import torch
from tiny import GPT2

from plaudit.learn.settings import LearnSettings
from plaudit.models.decoder import Decoder
from plaudit.models.load import fresh_model
from plaudit.training_api import wire
from plaudit.training_api.adapters import Adapters
from plaudit.training_api.ranks import ThreadGroup
from plaudit.training_api.server import application
from plaudit.training_api.service import Service

NAME = "tiny"
PROMPT = [3, 9, 27]
ADAM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
KINDS = {"target_tokens": (np.int64, 2)}
Given = tuple[Sequence[int], Mapping[str, Sequence[float]]]
"""Tokens of a datum's model_input, and its loss_fn_inputs."""


Work = Callable[["Client"], Awaitable[None]]
Do = Callable[..., None]
"""do(work, limits): run work(client) on a new service."""


def tiny(dtype: torch.dtype = torch.float32) -> Decoder:
    model = fresh_model(GPT2 | {"initializer_range": 0.2}, vocab_size=60, seed=3, dtype=dtype)
    assert isinstance(model, Decoder)
    return model.requires_grad_(False)


def service(tokenizer: Any, folder: Path, *, base: Decoder | None = None, **limits: Any) -> Service:
    base = base or tiny()
    group = ThreadGroup(Adapters(base, LearnSettings(precision=str(base.dtype).removeprefix("torch."))))
    named: dict[str, Any] = {"name": NAME, "models": 4, "heartbeat": 60.0, **limits}
    return Service(group, base, tokenizer, folder=folder, **named)


def training(model: str, seq_id: int, data: Sequence[Given], loss: str = "cross_entropy", **more: Any) -> bytes:
    """The body of a training request. `more`: `forward`, and options of the loss."""
    forward = more.pop("forward", False)
    sent = []
    for tokens, inputs in data:
        text = wire._new("Text", tokens=np.int32(tokens).tobytes())
        columns = []
        for key, column in inputs.items():
            kind, dtype = KINDS.get(key, (np.float32, 1))
            tensor = wire._new("Tensor", dense=np.asarray(column, kind).tobytes(), dtype=dtype, shape=[len(column)])
            columns.append(wire._new("Input", key=key, value=tensor))
        sent.append(wire._new("Datum", chunks=[wire._new("Chunk", text=text)], inputs=columns))
    options = [wire._new("Option", key=key, value=wire._new("Value", number=value)) for key, value in more.items()]
    named = {"model_id": model, "seq_id": seq_id, "loss": loss, "forward": forward}
    return bytes(wire._new("Request", data=sent, options=options, **named).SerializeToString())


def shifted(row: Sequence[int], trained: int) -> Given:
    """A row as a datum whose last `trained` tokens have weight 1."""
    count = len(row) - 1
    return row[:-1], {"target_tokens": row[1:], "weights": [0.0] * (count - trained) + [1.0] * trained}


ROWS = ((3, 9, 27, 21, 3), (8, 4, 2, 40), (11, 50, 40, 30))
DATA = [shifted(row, 2) for row in ROWS]


class Client:
    """Calls an application, within one event loop."""

    def __init__(self, served: Service, token: str | None = None, **headers: str):
        self.served = served
        app = application(served, names=("localhost",), token=token)
        self.http = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=app), base_url="http://127.0.0.1:8000/api/v1/", headers=headers
        )

    async def sent(self, path: str, body: Any) -> httpx2.Response:
        if isinstance(body, bytes):
            return await self.http.post(path, content=body, headers={"content-type": "application/x-protobuf"})
        return await self.http.post(path, json=body)

    async def told(self, path: str, body: Any) -> Any:
        response = await self.sent(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    async def result(self, path: str, body: Any) -> Any:
        """Begin a request and wait for its result: JSON, or a message of the reply."""
        request = (await self.told(path, body))["request_id"]
        response = await self.sent("retrieve_future", {"request_id": request})
        assert response.status_code == 200, response.text
        if response.headers["content-type"] == "application/json":
            return response.json()
        message = wire._new("Samples" if path == "asample" else "Output")
        message.ParseFromString(response.content)
        return message

    async def model(self, *, rank: int = 4, number: int = 0, session: str = "", seed: int = 7) -> str:
        session = session or (await self.told("create_session", {"tags": [], "sdk_version": "0.38.0"}))["session_id"]
        body = {"session_id": session, "model_seq_id": number, "base_model": NAME}
        made = await self.result("create_model", body | {"lora_config": {"rank": rank, "seed": seed}})
        assert "error" not in made, made
        return str(made["model_id"])

    async def step(self, model: str, seq_id: int, **adam: float) -> Any:
        return await self.result("optim_step", {"model_id": model, "seq_id": seq_id, "adam_params": ADAM | adam})

    async def trained(self, model: str, seq_id: int, data: Sequence[Given], *loss: str, **more: Any) -> Any:
        return await self.result("forward_backward", training(model, seq_id, data, *loss, **more))


def loss_of(output: Any) -> float:
    return float({one.key: one.value for one in output.metrics}["loss:sum"])


def logprobs_of(output: Any) -> list[np.ndarray]:
    """Each datum's log-probs."""
    (field,) = output.records[0].fields
    ends = np.frombuffer(field.value.offsets, np.int64) // 4
    flat = np.frombuffer(field.value.data, np.float32)
    return [flat[start:end] for start, end in pairwise(ends)]


async def sampled(client: Client, key: str, seq_id: int, **more: Any) -> tuple[list[list[int]], list[Any], list[float]]:
    """Tokens and log-probs of two answers, and log-probs of the prompt."""
    draw = {"max_tokens": 6, "temperature": 1, "seed": 5, **more}
    body = {"sampling_session_id": key, "seq_id": seq_id, "num_samples": 2, "prompt_logprobs": True}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
    found = await client.result("asample", body | {"prompt": prompt, "sampling_params": draw})
    tokens = [np.frombuffer(one.tokens, np.int32).tolist() for one in found.sequences]
    logprobs = [np.frombuffer(one.logprobs, np.float32).tolist() for one in found.sequences]
    return tokens, logprobs, np.frombuffer(found.prompt_logprobs, np.float32).tolist()
