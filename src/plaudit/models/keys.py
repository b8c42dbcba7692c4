"""Reading a Hugging Face config key by key, so that no key which changes the arithmetic goes unnoticed.

What each family makes of its keys is `families.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from plaudit.models.config import Activation, RopeScaling
from plaudit.support.fields import nearest


class UnsupportedError(ValueError):
    """A config needs something that the native decoder does not compute."""


class UnknownKeyError(UnsupportedError):
    """A config has keys that its family does not read: a newer feature, or a typing error."""


_INERT = """
    architectures model_type transformers_version torch_dtype dtype use_cache name_or_path tokenizer_class torchscript
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
    id2label label2id num_labels problem_type finetuning_task task_specific_params prefix n_ctx tf_legacy_loss
    attention_dropout attn_pdrop embd_pdrop resid_pdrop classifier_dropout hidden_dropout
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    pretraining_tp reorder_and_upcast_attn gradient_checkpointing use_bfloat16 attn_implementation
    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate chunk_size_feed_forward
    is_encoder_decoder is_decoder cross_attention_hidden_size tie_encoder_decoder remove_invalid_values
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    is_llama_config transformers.js_config unsloth_fixed unsloth_version
    num_return_sequences exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
INERT = frozenset(_INERT.split())
"""Keys that change nothing about the function computed (dropout: we train without it)."""

ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a mapping",
}


class Keys:
    """A config's keys, taken one by one. `finish` refuses those that are left, since nothing computes them."""

    def __init__(self, config: Mapping[str, Any]):
        self.model_type = str(config["model_type"])
        self._left = dict(config)
        self._known: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """Take the key and return its value, or `default` if it is missing or null."""
        value = self.nullable(name, default)
        return default if value is None else value

    def nullable(self, name: str, default: Any) -> Any:
        """Take the key and return its value, which may be null, or `default` if it is missing."""
        self._known.add(name)
        return self._typed(name, self._left.pop(name, default), default)

    def peek(self, name: str, default: Any = None) -> Any:
        """Return a key's value, or `default` if missing or null, without taking it: other code takes it."""
        value = self._typed(name, self._left.get(name), default)
        return default if value is None else value

    def _typed(self, name: str, value: Any, like: Any) -> Any:
        """Return `value`. Raises ValueError if neither is None and its type is not that of `like`."""
        fits = value is None or like is None or type(value) is type(like) or (type(like), type(value)) == (float, int)
        if not fits:
            raise ValueError(f"{self.model_type}: {name}={value!r} must be {TYPES[type(like)]}.")
        return value

    def expect(self, name: str, only: Any) -> None:
        """Take the key `name`. Raises UnsupportedError unless its value is `only` (or missing, or null)."""
        value = self.take(name, only)
        if value != only:
            self.refuse(f"{name}={value!r} (only {only!r} is computed)")

    def activation(self, name: str, default: str) -> Activation:
        value = self.take(name, default)
        if value not in ACTIVATIONS:
            self.refuse(f"{name}={value!r} (known: {', '.join(ACTIVATIONS)})")
        return ACTIVATIONS[value]

    def rope(self, max_positions: int) -> tuple[float, RopeScaling | None]:
        """Take rotary base and scaling: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
        rope = dict(self.take("rope_scaling", {}) or self.take("rope_parameters", {}))
        self.take("rope_parameters", {})
        top = self.take("rope_theta", 10_000.0)
        theta = float(self._typed("rope_theta", rope.pop("rope_theta", None), 1.0) or top)
        kind = rope.pop("type", "default")
        kind = rope.pop("rope_type", kind)
        original = rope.pop("original_max_position_embeddings", max_positions)
        original = self.take("original_max_position_embeddings", original)
        self.expect("partial_rotary_factor", 1.0)
        if rope.pop("partial_rotary_factor", 1.0) != 1.0:
            self.refuse("partial_rotary_factor below 1")
        scaling = None
        if kind == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            if missing := [name for name in names if rope.get(name) is None]:
                raise ValueError(f"{self.model_type}: rope_type='llama3' needs {', '.join(missing)}.")
            factor, low, high = (self._typed(name, rope.pop(name), 1.0) for name in names)
            scaling = RopeScaling(
                factor=float(factor),
                low_frequency_factor=float(low),
                high_frequency_factor=float(high),
                original_positions=self._typed("original_max_position_embeddings", original, 1),
            )
        elif kind != "default":
            self.refuse(f"rope_scaling with rope_type={kind!r} (known: 'default', 'llama3')")
        if rope:
            self.refuse(f"rope_parameters with {', '.join(sorted(rope))}")
        return theta, scaling

    def refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(f"The native decoder does not compute this {self.model_type} config: {what}.")

    def finish(self) -> None:
        """Raise UnknownKeyError for keys not taken, unless they are inert, private, null or empty (which means off)."""
        unknown = [
            name
            for name, value in self._left.items()
            if name not in INERT and not name.startswith("_") and value is not None and value != {} and value != []
        ]
        if unknown:
            listed = ", ".join(f"{name}={self._left[name]!r}" for name in sorted(unknown))
            raise UnknownKeyError(
                f"Unknown in a {self.model_type} config: {listed}{nearest(min(unknown), self._known)}"
            )
