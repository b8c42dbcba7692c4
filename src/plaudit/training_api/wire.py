"""The messages of Tinker's API that are protobuf: training requests, and replies with numbers. All others are JSON.

    bytes -> read_request -> the message, Datum, ...; log-probs, Completions -> training_reply, sample_reply -> bytes

Field numbers are those of `tinker_public.proto` in the package tinker 0.38. Left out: images, audio, sparse tensors,
provenance; a request that has one of the first three is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from plaudit.types import Completion

Array = np.ndarray[Any, np.dtype[Any]]
SCHEMA = {
    "Tensor": "bytes dense 1, bytes sparse 2, int32 dtype 3, int64* shape 4",
    "Input": "string key 1, Tensor value 2",
    "Text": "bytes tokens 1",
    "Chunk": "Text text 1, bytes image 2, bytes audio 3",
    "Datum": "Chunk* chunks 1, Input* inputs 2",
    "Value": "double number 1, string text 2",
    "Option": "string key 1, Value value 2",
    "Request": "string model_id 1, int32 seq_id 2, Datum* data 3, string loss 4, bool forward 6, Option* options 7",
    "Batched": "bytes data 1, bytes offsets 2, int32 dtype 3",
    "Field": "string key 1, Batched value 2",
    "Record": "string type_tag 1, Field* fields 2, int64 datums 3",
    "Metric": "string key 1, double value 2",
    "Output": "string kind 1, Record* records 2, Metric* metrics 3",
    "Sequence": "int32 stop_reason 1, bytes tokens 2, bytes logprobs 3",
    "Samples": "Sequence* sequences 1, bytes prompt_logprobs 2",
}
"""Our names of the messages and fields; `*` repeats a field. On the wire a map is a repeated message of key and value,
and an enumeration is an int32."""
KINDS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12}
MESSAGE, ONE, MANY = 11, 1, 3
DTYPES: dict[int, type[Any]] = {1: np.float32, 2: np.int64, 3: np.int32}
STOP, LENGTH = 0, 1
RECORD = "ArrayRecord"


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """A sequence with what its loss reads, one entry a token of `tokens`: entry i is about the token after it."""

    tokens: Array  # (n,) int64
    inputs: Mapping[str, Array]  # each (n,)


def read_request(body: bytes) -> tuple[Any, list[Datum]]:
    """Read the body of a training request. Return the "Request" of SCHEMA, and its data. Raises ValueError."""
    message = _new("Request")
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ValueError(f"the body is no ForwardBackwardRequest: {error!s:.100}") from None
    return message, [_datum(one, f"data[{place}]") for place, one in enumerate(message.data)]


def _datum(message: Any, where: str) -> Datum:
    if any(chunk.image or chunk.audio for chunk in message.chunks):
        raise ValueError(f"{where} has an image or audio: only chunks of tokens are served")
    tokens = _array(b"".join(chunk.text.tokens for chunk in message.chunks), np.int32, f"{where}.model_input")
    inputs = {}
    for one in message.inputs:
        name, tensor = f"{where}.loss_fn_inputs[{one.key!r:.60}]", one.value
        if tensor.sparse or tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is sparse or of an unknown dtype: give a dense tensor of float32 or int64")
        found = _array(tensor.dense, DTYPES[tensor.dtype], name)
        if len(found) != len(tokens) or len(tensor.shape) > 1:
            shape = list(tensor.shape) or [len(found)]
            raise ValueError(
                f"{name} has shape {shape!s:.60}, but needs an entry a token of model_input: [{len(tokens)}]"
            )
        inputs[one.key] = found
    return Datum(tokens=tokens.astype(np.int64), inputs=inputs)


def _array(data: bytes, dtype: type[Any], name: str) -> Array:
    if len(data) % np.dtype(dtype).itemsize:
        raise ValueError(f"{name} has {len(data)} bytes, which are no whole numbers of {np.dtype(dtype)}")
    return np.frombuffer(data, dtype)


def training_reply(logprobs: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """Return a ForwardBackwardOutput with each datum's log-probs, (n,) float32."""
    ends = np.cumsum([0, *(one.size * 4 for one in logprobs)], dtype=np.int64)
    data = np.concatenate(logprobs).astype(np.float32)
    field = _new("Batched", data=data.tobytes(), offsets=ends.tobytes(), dtype=1)
    record = _new("Record", type_tag=RECORD, fields=[_new("Field", key="logprobs", value=field)], datums=len(logprobs))
    figures = [_new("Metric", key=key, value=value) for key, value in metrics.items()]
    return bytes(_new("Output", kind=RECORD, records=[record], metrics=figures).SerializeToString())


def sample_reply(answers: Sequence[Completion], prompt: Array | None) -> bytes:
    """Return a SampleResponse. `prompt` has the log-probs of the prompt's tokens, (p,), NaN where there is none."""
    sequences = [
        _new(
            "Sequence",
            stop_reason=STOP if answer.finished else LENGTH,
            tokens=np.asarray(answer.tokens, np.int32).tobytes(),
            logprobs=np.asarray(answer.logprobs, np.float32).tobytes(),
        )
        for answer in answers
    ]
    scored = b"" if prompt is None else prompt.astype(np.float32).tobytes()
    return bytes(_new("Samples", sequences=sequences, prompt_logprobs=scored).SerializeToString())


@cache
def _messages() -> dict[str, Any]:
    """Return the class of each message of SCHEMA."""
    file = descriptor_pb2.FileDescriptorProto(name="training_api.proto", package="api", syntax="proto3")
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            kind, field, number = text.split()
            label, kind = MANY if kind.endswith("*") else ONE, kind.removesuffix("*")
            one = message.field.add(name=field, number=int(number), label=label, type=KINDS.get(kind, MESSAGE))
            if one.type == MESSAGE:
                one.type_name = f".api.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"api.{name}")) for name in SCHEMA}


def _new(name: str, **fields: Any) -> Any:
    return _messages()[name](**fields)
