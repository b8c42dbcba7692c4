"""The API's requests that are JSON: their fields with types and bounds, named as the client names them.

JSON -> read -> an object with the fields -> (server.py); that of "sample" -> question_of -> Question
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import fields, make_dataclass
from typing import Any

from plaudit.rollout.settings import LEAST_TEMPERATURE
from plaudit.support.fields import nearest, setting, shown, wrong
from plaudit.training_api.losses import LOSSES
from plaudit.training_api.samplers import Question
from plaudit.types import Sampling

LARGEST = 999_999_999
MOST_STOPS, LONGEST_STOP = 16, 1000
IGNORED = frozenset("type user_metadata ttl_seconds weights_access_token allow_metadata_only".split())
"""Fields that change nothing here."""
Field = tuple[Any, Any, dict[str, Any]]
TEXT: Field = (str, "", {})
NAME: Field = (str | None, None, {})
PART: Field = (Any, None, {})
FLAG: Field = (bool | None, None, {})
PLACE: Field = (int, 0, {"least": 0, "most": LARGEST})
NUMBER: Field = (int, 1, {"least": 1, "most": LARGEST})
CREATED: dict[str, Field] = {"session_id": TEXT, "model_seq_id": PLACE, "base_model": NAME, "optimizer_config": PART}
TRAINED: dict[str, Field] = {"model_id": TEXT, "seq_id": NUMBER}
SAMPLED: dict[str, Field] = {"session_id": TEXT, "sampling_session_seq_id": PLACE}


CLIPS: dict[str, Field] = {
    "clip_low_threshold": (float, 0.8, {"least": 0, "most": 1}),
    "clip_high_threshold": (float, 1.2, {"least": 1}),
}


def _only(*values: Any) -> Field:
    return type(values[0]) | None, values[0], {"choices": values}


REQUESTS: Mapping[str, dict[str, Field]] = {
    "session_heartbeat": {"session_id": TEXT},
    "retrieve_future": {"request_id": TEXT},
    "get_info": {"model_id": TEXT},
    "weights_info": {"tinker_path": TEXT},
    "create_model": {**CREATED, "lora_config": PART},
    "optim_step": {**TRAINED, "adam_params": PART},
    "save_weights": {**TRAINED, "path": NAME, "overwrite": FLAG},
    "save_weights_for_sampler": {**TRAINED, **SAMPLED, "path": NAME, "kind": _only("snapshot")},
    "load_weights": {**CREATED, "model_id": NAME, "seq_id": NUMBER, "path": TEXT, "optimizer": FLAG},
    "create_sampling_session": {**SAMPLED, "base_model": NAME, "model_path": NAME},
    "sample": {
        "sampling_session_id": TEXT,
        "seq_id": (int, 0, {"least": 0, "most": 1 << 62}),
        "num_samples": (int, 1, {"least": 1, "most": 1024}),
        "prompt": PART,
        "sampling_params": PART,
        "prompt_logprobs": FLAG,
        "prompt_logprobs_last_n": (int | None, None, {"least": 1}),
        "topk_prompt_logprobs": _only(0),
        "topk_sample_logprobs": _only(0),
        "prompt_alt_tokens_k": _only(0),
        "record_stability_info": _only(False),
    },
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": CLIPS,
    "cispo": CLIPS,
    "dro": {"beta": (float, 0.05, {"least": 0})},
    "optimizer_config": {"type": _only("adamw")},
    "lora_config": {
        "rank": (int, 32, {"least": 1, "most": 256}),
        "seed": (int | None, None, {"least": 0, "most": LARGEST}),
        "train_unembed": FLAG,
        "train_mlp": _only(True),
        "train_attn": _only(True),
    },
    "adam_params": {
        "learning_rate": (float, 1e-4, {"least": 0}),
        "beta1": (float, 0.9, {"least": 0, "below": 1}),
        "beta2": (float, 0.95, {"least": 0, "below": 1}),
        "eps": (float, 1e-12, {"above": 0}),
        "weight_decay": (float, 0.0, {"least": 0}),
        "grad_clip_norm": (float, 0.0, {}),
    },
    "sampling_params": {
        "max_tokens": (int | None, None, {"least": 1}),
        "seed": (int | None, None, {"least": 0, "most": 1 << 62}),
        "stop": PART,
        "temperature": (float, 1.0, {"least": 0}),
        "top_k": (int, -1, {"least": -1, "most": 1 << 31}),
        "top_p": (float, 1.0, {"above": 0, "most": 1}),
    },
}
"""Each request, each part of one, and the options of each loss, with their fields: type, default, bounds."""
CLASSES = {
    name: make_dataclass(name, [(key, kind, setting(value, **rule)) for key, (kind, value, rule) in shape.items()])
    for name, shape in REQUESTS.items()
}


def read(name: str, body: Any) -> Any:
    """Read the request, or the part of one, of this name. Raises ValueError for unknown fields, types and values."""
    if not isinstance(body, Mapping):
        raise ValueError(f"{name} is {shown(body)}; it must be an object")
    known = {one.name for one in fields(CLASSES[name])}
    given = {key: value for key, value in body.items() if key in known or key not in IGNORED}
    if unknown := next((key for key in given if key not in known), None):
        raise ValueError(f"{name} has {unknown!r:.60}, which is not served{nearest(unknown, known)}")
    found = CLASSES[name](**given)
    if problems := wrong(found):
        raise ValueError(f"{name}: {'; '.join(problems)}")
    return found


def options_of(loss: str, given: Mapping[str, float | str]) -> dict[str, float]:
    """Return a loss's options. Raises ValueError for an unknown loss, option or value."""
    if loss not in LOSSES:
        raise ValueError(f"loss_fn={loss!r:.60} is not served{nearest(loss, LOSSES)}; there are {', '.join(LOSSES)}")
    return dict(vars(read(loss, given)))


def question_of(asked: Any, *, vocabulary: int, positions: int) -> Question:
    """Return what a sampling request asks. Raises ValueError."""
    draw, prompt = read("sampling_params", asked.sampling_params), _tokens(asked.prompt, vocabulary)
    if not 0 < len(prompt) < positions:
        raise ValueError(f"the prompt has {len(prompt)} tokens: give 1 to {positions - 1}, the model's positions")
    if 0 < draw.temperature < LEAST_TEMPERATURE:
        raise ValueError(f"temperature={draw.temperature} is below {LEAST_TEMPERATURE}: give 0 (greedy), or more")
    stops: Any = [draw.stop] if isinstance(draw.stop, str) else [] if draw.stop is None else draw.stop
    whole = isinstance(stops, list) and len(stops) <= MOST_STOPS
    texts = whole and all(isinstance(one, str) and 0 < len(one) <= LONGEST_STOP for one in stops)
    numbers = whole and all(type(one) is int and 0 <= one < vocabulary for one in stops)
    if not (texts or numbers):
        raise ValueError(f"stop={shown(draw.stop)}: give at most {MOST_STOPS} texts, or that many tokens")
    sampling = Sampling(
        temperature=draw.temperature,
        top_p=draw.top_p,
        top_k=max(draw.top_k, 0),
        max_tokens=draw.max_tokens or positions,
        stop=() if numbers else tuple(stops),
        seed=secrets.randbelow(LARGEST) if draw.seed is None else draw.seed,
    )
    ends = None if draw.stop == [] else frozenset[int](stops if numbers else ())
    scored = (asked.prompt_logprobs_last_n or len(prompt)) if asked.prompt_logprobs else 0
    return Question(prompt=prompt, sampling=sampling, count=asked.num_samples, ends=ends, scored=scored)


def _tokens(prompt: Any, vocabulary: int) -> list[int]:
    """Return the tokens of a ModelInput. Raises ValueError."""
    chunks = prompt.get("chunks") if isinstance(prompt, Mapping) else None
    if not isinstance(chunks, list):
        raise ValueError(f"prompt={shown(prompt)} has no list of chunks")
    parts = [one.get("tokens") if isinstance(one, Mapping) else None for one in chunks]
    if not all(isinstance(part, list) for part in parts):
        raise ValueError("prompt has a chunk that is no encoded_text: only tokens are served")
    tokens: list[int] = [token for part in parts for token in part]  # type: ignore[union-attr]
    if not all(type(one) is int and 0 <= one < vocabulary for one in tokens):
        raise ValueError(f"prompt has a token outside of the vocabulary, 0 to {vocabulary - 1}")
    return tokens
