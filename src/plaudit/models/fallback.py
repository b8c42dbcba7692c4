"""Any causal LM that transformers has and the native decoder does not, with the same interface.

    tokens (n,) + Packed -> right-padded rows -> transformers' trunk -> hidden (n, width) of the real tokens -> head

It is slower: it computes on padding, and without a KV cache generation recomputes what it has read. It runs without
dropout, as the native decoder does. Attention is torch's SDPA if that computes everything the model asks for, else
transformers' eager attention (soft caps, sinks). Left out: code that comes with a checkpoint, and models whose logits
are more than a head on the trunk's last hidden state (a probe at loading refuses those).
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plaudit.compute.context import Context, Packed
from plaudit.models.base import LanguageModel, SpecialTokens
from plaudit.models.config import SCALAR_HEAD, HeadKind
from plaudit.models.files import read_json, stored_numbers, weight_files
from plaudit.models.fresh import draw_normal, generator
from plaudit.models.keys import UnknownKeyError
from plaudit.support.fields import nearest
from plaudit.support.visible import visible

log = logging.getLogger(__name__)

HARMLESS = frozenset(
    """
    sliding_window position_ids cache_position use_cache output_attentions output_hidden_states output_router_logits
    return_dict
    """.split()
)
"""Arguments that models pass to SDPA, which ignores them without effect: a window, for instance, is in the mask
already."""


SIZE = re.compile("(size|layers?|dim|d_model|embd|heads?|experts)$")
"""Names of configuration keys (sizes, layers) whose values cannot exceed the number of the model's weights."""


class Logits(nn.Module):
    """An LM head, with the factor (Cohere, Granite) and soft cap (Gemma) that some families apply to its logits."""

    def __init__(self, linear: nn.Module, config: Any):
        super().__init__()
        self.linear = linear
        self.factor = float(_set(config, "logit_scale") or 1.0) / float(_set(config, "logits_scaling") or 1.0)
        self.cap: float | None = _set(config, "final_logit_softcapping")

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.linear(hidden) * self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


class Fallback(LanguageModel):
    """A transformers model with an LM head or a one-label classification head."""

    caches: ClassVar[bool] = False

    def __init__(self, inner: Any, *, head: HeadKind):
        """`inner` is a ...ForCausalLM or a ...ForSequenceClassification."""
        super().__init__()
        self.inner = inner
        self.head_kind: HeadKind = head
        self.special = SpecialTokens()
        self._text = inner.config.get_text_config()
        accepted = inspect.signature(inner.base_model.forward).parameters
        self._masked = "attention_mask" in accepted
        self.turn = _turn(self._text)
        self.head = Logits(inner.get_output_embeddings(), self._text) if head == "lm" else inner.score
        self.eval()

    def train(self, mode: bool = True) -> Fallback:
        """Do nothing: gradients flow in either mode, and training mode would only add dropout."""
        return super().train(False)

    @property
    def vocab_size(self) -> int:
        return int(self._text.vocab_size)

    @property
    def max_positions(self) -> int:
        return _positions(self._text)

    @property
    def pad(self) -> int | None:
        """The pad token's id, which config.json may leave to the family's default; None if there is none."""
        found: int | None = self._text.pad_token_id
        return found

    @property
    def blocks(self) -> Sequence[nn.Module]:
        names = set(self.inner._no_split_modules or ())
        return [module for module in self.modules() if type(module).__name__ in names]

    def forward(self, tokens: Tensor, context: Context, read: Tensor | None = None) -> Tensor:
        if type(context) is not Packed:  # a subclass writes a cache, which would stay empty
            raise TypeError(
                f"A model that runs through transformers reads whole sequences, not {type(context).__name__}. "
                "Use model.packed(lengths), or generate without a cache."
            )
        rows = torch.split(tokens, list(context.lengths))
        short = [k for k, length in enumerate(context.lengths) if length <= self.turn]
        if 0 < len(short) < len(rows):
            long = sorted({*range(len(rows))} - {*short})
            states = {
                k: state for side in (short, long) for k, state in zip(side, self._states(rows, side), strict=True)
            }
            hidden = torch.cat([states[k] for k in range(len(rows))])
        else:
            hidden = torch.cat(self._states(rows, range(len(rows))))
        return hidden if read is None else hidden.index_select(0, read)

    def _states(self, rows: Sequence[Tensor], chosen: Sequence[int]) -> list[Tensor]:
        """Return the hidden states of each chosen row (length, width), computed in one padded pass."""
        lengths = [len(rows[k]) for k in chosen]
        padded = nn.utils.rnn.pad_sequence([rows[k] for k in chosen], batch_first=True)  # (rows, longest)
        ends = torch.tensor(lengths, device=padded.device)
        real = torch.arange(padded.shape[1], device=padded.device)[None, :] < ends[:, None]
        mask = {"attention_mask": real.long()} if self._masked else {}
        output = self.inner.base_model(padded, use_cache=False, **mask)
        states = output.last_hidden_state[real].to(self.dtype)  # Mamba 2 keeps its residuals in float32
        return list(torch.split(states, lengths))

    def hf_config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self.inner.config.to_json_string())
        return {**config, "architectures": [type(self.inner).__name__]}

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters by their names in memory; for a few families transformers writes other names to disk."""
        for name, parameter in self.named_parameters():
            yield name.removeprefix("inner."), parameter.detach()

    def save_weights(self, folder: Path, *, max_shard_bytes: float) -> None:
        self.inner.save_pretrained(folder, max_shard_size=int(max_shard_bytes))


def folder_positions(folder: Path) -> int:
    """Return `max_positions` of the model in a folder. Raises ValueError if transformers cannot read config.json."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"{folder}: transformers does not read its config.json: {error}") from error
    return _positions(config.get_text_config())


def _positions(config: Any) -> int:
    names = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length")
    return int(_set(config, *names) or 2**31 - 1)  # recurrent and ALiBi models have no limit of their own


def _set(config: Any, *names: str) -> Any:
    """Return the first value of `config` under `names` that is neither missing nor 0; None if there is none."""
    return next((value for name in names if (value := getattr(config, name, None))), None)


def _turn(config: Any) -> int:
    """Return the length above which transformers uses other rotary frequencies for all rows of a call (longrope), or 0.
    Rows up to it and longer ones are computed separately, so that no row depends on its neighbours."""
    rope = _set(config, "rope_parameters") or {}
    longest = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
    return int(longest or 0)


def _check_sizes(keys: Mapping[str, Any], stored: int) -> None:
    """Raise ValueError for a size or number of layers above the number of stored weights (and a million): transformers
    would allocate memory or make modules for it without end."""
    for key, value in keys.items():
        if isinstance(value, Mapping):
            _check_sizes(value, stored)
        elif SIZE.search(key) and isinstance(value, int) and value > max(stored, 10**6):
            raise ValueError(f"The config.json has {key}={value:,}, and its weights are {stored:,}. Copy both again.")


def load_fallback(folder: Path, *, head: HeadKind, dtype: torch.dtype, reason: str, seed: int) -> Fallback:
    """Load the model of a folder through transformers. A scalar head that the folder lacks is drawn from `seed`."""
    _check_sizes(read_json(folder / "config.json"), stored_numbers(weight_files(folder)))
    labels = {"num_labels": 1} if head == "scalar" else {}
    try:
        inner, info = _auto_class(head).from_pretrained(
            folder, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **labels
        )
    except (ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"{folder}: {reason} Transformers does not load it either: {error}") from error
    missing = set(info["missing_keys"])
    fresh = head == "scalar" and SCALAR_HEAD in missing
    prefix = inner.base_model_prefix + "."
    unexpected = [name for name in info["unexpected_keys"] if head == "lm" or name.startswith(prefix)]
    wrong = sorted(missing - ({SCALAR_HEAD} if fresh else set())) + sorted(unexpected)
    if wrong:
        raise ValueError(
            f"The weights of {folder} do not fit its config.json: missing or unknown {', '.join(wrong[:5])}"
            f"{f' and {len(wrong) - 5} more' if len(wrong) > 5 else ''}. "
            "A reward model has no LM head; otherwise check that both come from the same model."
        )
    return _wrap(inner, head=head, reason=reason, seed=seed if fresh else None)


def fresh_fallback(config: Mapping[str, Any], *, head: HeadKind, reason: str, seed: int) -> Fallback:
    """Make a transformers model with random weights from config keys."""
    from transformers import AutoConfig

    keys = dict(config)
    model_type = keys.pop("model_type")
    try:
        default = AutoConfig.for_model(model_type)
    except ValueError as error:
        raise ValueError(f"{reason} Transformers does not know it either.") from error
    known = {*default.to_dict(), *default.attribute_map, "rope_theta", "rope_scaling"}
    unknown = sorted(set(keys) - known)
    if unknown:
        raise UnknownKeyError(
            f"Unknown in a {model_type} config: {', '.join(unknown)}{nearest(next(iter(unknown)), known)}"
        )
    built = AutoConfig.for_model(model_type, **keys, **({"num_labels": 1} if head == "scalar" else {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inner = _auto_class(head).from_config(built)
    return _wrap(inner, head=head, reason=reason, seed=seed if head == "scalar" else None)


def _auto_class(head: HeadKind) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification


def _wrap(inner: Any, *, head: HeadKind, reason: str, seed: int | None) -> Fallback:
    """Wrap a transformers model and check it. `seed` draws a fresh scalar head; None leaves the head as it is."""
    if head == "scalar" and "score" not in dict(inner.named_children()):
        raise ValueError(
            f"transformers' {type(inner).__name__} has no head named score, so it is not a causal reward model. "
            "Use a causal family for judges and critics."
        )
    model = Fallback(inner, head=head)
    if seed is not None:
        weight = inner.score.weight
        draw_normal(weight, 1.0 / math.sqrt(weight.shape[1] + 1), generator(seed))
    _attend_in_full(model)
    _probe(model)
    _warn_slower(inner.config.model_type, reason)
    return model


@torch.no_grad()
def _attend_in_full(model: Fallback) -> None:
    """Switch the model to eager attention if it passes SDPA arguments that SDPA ignores."""
    with _unread_by_sdpa() as unread:
        model(torch.arange(4, device=model.device) % model.vocab_size, model.packed([4]))
    if unread:
        model.inner.set_attn_implementation("eager")


@contextmanager
def _unread_by_sdpa() -> Iterator[set[str]]:
    """While active, collect the names of arguments that models pass to transformers' SDPA and that it ignores."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    functions: Any = ALL_ATTENTION_FUNCTIONS
    sdpa = functions["sdpa"]
    read = {*inspect.signature(sdpa).parameters, *HARMLESS}
    unread: set[str] = set()

    def watched(*arguments: Any, **named: Any) -> Any:
        unread.update(name for name, value in named.items() if value is not None and name not in read)
        return sdpa(*arguments, **{name: value for name, value in named.items() if name in read})

    functions["sdpa"] = watched
    try:
        yield unread
    finally:
        del functions["sdpa"]


@torch.no_grad()
def _probe(model: Fallback) -> None:
    """Raise ValueError if the trunk is not causal, or if logits are more than our head on the trunk's hidden states."""
    tokens = torch.arange(4, device=model.device) % model.vocab_size
    hidden = model(tokens, model.packed([4]))
    prefix = model(tokens[:3], model.packed([3]))
    tolerance = 1e-4 if model.dtype == torch.float32 else 5e-2
    name = type(model.inner).__name__
    if not torch.allclose(hidden[:3], prefix, rtol=tolerance, atol=tolerance):
        raise ValueError(f"{name} is not causal: a token's hidden state depends on later ones. Use a causal LM.")
    if model.head_kind == "lm":
        logits = model.inner(tokens[None], use_cache=False).logits[0].to(hidden.dtype)
        if not torch.allclose(model.head(hidden), logits, rtol=tolerance, atol=tolerance):
            raise ValueError(
                f"{name} computes its logits by more than a head on its last hidden state, which is not supported. "
                "Use another family."
            )


@functools.cache
def _warn_slower(model_type: str, reason: str) -> None:
    text = f"{model_type} runs through transformers, slower than the native decoder. {reason}"
    log.warning("%s", visible(text, line=True))
