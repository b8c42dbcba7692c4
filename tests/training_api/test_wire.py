"""Messages as the package tinker 0.38.0 writes them, recorded, and what they are read as."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from calling import training

from plaudit.training_api import wire
from plaudit.training_api.asked import options_of
from plaudit.training_api.losses import batch_of
from plaudit.training_api.wire import read_request, sample_reply, training_reply
from plaudit.types import Completion, Finish

SENT = (  # ModelInput [5, 17, 30], target_tokens [17, 30, 9], weights [0, 1, 0.5]
    "CgltOnRyYWluOjAQBxpkChAKDgoMBQAAABEAAAAeAAAAEh4KB3dlaWdodHMSEwoMAAAAAAAAgD8AAAA/GAEiAQMSMAoNdGFyZ2V0X3Rva2Vucx"
    "IfChgRAAAAAAAAAB4AAAAAAAAACQAAAAAAAAAYAiIBAyINY3Jvc3NfZW50cm9weQ=="
)
CLIPPED = (  # target_tokens [0, 30, 9], logprobs [0, -1, -2], advantages [0, 1, -0.5], ppo, clip_low_threshold 0.9
    "CgltOnRyYWluOjAQCBqIAQoQCg4KDAUAAAARAAAAHgAAABIhCgphZHZhbnRhZ2VzEhMKDAAAAAAAAIA/AAAAvxgBIgEDEh8KCGxvZ3Byb2JzEh"
    "MKDAAAAAAAAIC/AAAAwBgBIgEDEjAKDXRhcmdldF90b2tlbnMSHwoYAAAAAAAAAAAeAAAAAAAAAAkAAAAAAAAAGAIiAQMiA3BwbyodChJjbGlw"
    "X2xvd190aHJlc2hvbGQRzczMzMzM7D86HwoSY2xpcF9sb3dfdGhyZXNob2xkEgkJzczMzMzM7D8="
)


def test_a_recorded_request_becomes_a_row_with_its_last_target() -> None:
    message, data = read_request(base64.b64decode(SENT))
    assert (message.model_id, message.seq_id, message.loss, message.forward) == ("m:train:0", 7, "cross_entropy", False)
    batch = batch_of(data, message.loss, vocabulary=60, positions=128)
    assert batch.tokens.tolist() == [5, 17, 30, 9] and batch.lengths.tolist() == [4]
    assert batch.trainable.tolist() == [False, True, True, True]
    assert batch.weight is not None and batch.weight.tolist() == [0, 0, 1, 0.5]


def test_padding_in_a_recorded_request_is_not_trained() -> None:
    message, data = read_request(base64.b64decode(CLIPPED))
    options = options_of(message.loss, {one.key: one.value.number for one in message.options})
    assert options == {"clip_low_threshold": 0.9, "clip_high_threshold": 1.2}
    batch = batch_of(data, message.loss, vocabulary=60, positions=128)
    assert batch.trainable.tolist() == [False, False, True, True], "the first target, 0, is not the next token, 17"
    assert batch.advantages is not None and batch.advantages.tolist() == [0, 0, 1, -0.5]
    assert batch.behaviour is not None and batch.behaviour.tolist() == [0, 0, -1, -2]


def test_a_request_of_ours_has_the_bytes_of_theirs() -> None:
    ours = training("m:train:0", 7, [([5, 17, 30], {"weights": [0, 1, 0.5], "target_tokens": [17, 30, 9]})])
    assert ours == base64.b64decode(SENT)


def test_replies_have_every_number() -> None:
    columns = [np.float32([-1, -2]), np.float32([-3])]
    message = wire._new("Output")
    message.ParseFromString(training_reply(columns, {"loss:sum": 1.5}))
    (record,) = message.records
    assert (message.kind, record.datums) == ("ArrayRecord", 2)
    assert np.frombuffer(record.fields[0].value.data, np.float32).tolist() == [-1, -2, -3]
    assert np.frombuffer(record.fields[0].value.offsets, np.int64).tolist() == [0, 8, 12]
    assert [(one.key, one.value) for one in message.metrics] == [("loss:sum", 1.5)]

    answer = Completion(tokens=[4, 5], logprobs=[-0.5, -0.25], versions=[0, 0], text="", finish=Finish.LENGTH)
    message = wire._new("Samples")
    message.ParseFromString(sample_reply([answer], np.float32([np.nan, -1])))
    assert np.frombuffer(message.sequences[0].tokens, np.int32).tolist() == [4, 5]
    assert np.frombuffer(message.sequences[0].logprobs, np.float32).tolist() == [-0.5, -0.25]
    assert message.sequences[0].stop_reason == 1, "length"
    assert np.frombuffer(message.prompt_logprobs, np.float32).tolist()[1] == -1


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xff\xff", "ForwardBackwardRequest"),
        (training("m", 1, [([1, 2], {"target_tokens": [2]})]), r"shape \[1\], but needs .*\[2\]"),
    ],
)
def test_what_cannot_be_read_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_request(data)


def test_images_and_sparse_tensors_are_refused() -> None:
    image = wire._new("Datum", chunks=[wire._new("Chunk", image=b"png")])
    tensor = wire._new("Tensor", sparse=b"x", dtype=1)
    sparse = wire._new("Datum", inputs=[wire._new("Input", key="weights", value=tensor)])
    for datum, says in ((image, "image"), (sparse, "sparse")):
        with pytest.raises(ValueError, match=says):
            read_request(wire._new("Request", data=[datum]).SerializeToString())
