"""How much a line's useful work is, and the least time that it can take: the arithmetic behind the `floor` columns.

    model keys -> Size -> FLOPs of a useful token -> seconds at the best matrix product's rate of the same run

A useful token is one of a row, prompt and answer, without padding. Training a token takes 6N FLOPs, a forward pass 2N;
N counts every weight that a matrix product reads: no embeddings, but the head. Attention's own products come on top
only where a line asks for it (`attention_length`). Left out: norms, activations, the optimizer, sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Size:
    """What a decoder's cost depends on."""

    layers: int
    width: int
    """Of the residual stream."""
    attention: int
    """Heads times their dimension."""
    cached: int
    """Key heads times their dimension: numbers that one layer keeps of one token for K, and as many for V."""
    hidden: int
    """Of the MLP."""
    gated: bool
    """Three matrices in the MLP, not two."""
    vocabulary: int

    @classmethod
    def of(cls, config: Mapping[str, Any], vocabulary: int) -> Size:
        """From Hugging Face config keys of GPT-2 or Llama."""
        if config["model_type"] == "gpt2":
            width = config["n_embd"]
            hidden = config.get("n_inner") or 4 * width
            return cls(config["n_layer"], width, width, width, hidden, False, vocabulary)
        width, heads = config["hidden_size"], config["num_attention_heads"]
        head = config.get("head_dim") or width // heads
        cached = config.get("num_key_value_heads", heads) * head
        layers, hidden = config["num_hidden_layers"], config["intermediate_size"]
        return cls(layers, width, heads * head, cached, hidden, True, vocabulary)

    @property
    def parameters(self) -> int:
        """N: weights of matrix products, the head included, embeddings, norms and biases not."""
        projections = self.width * (2 * self.attention + 2 * self.cached)
        mlp = self.width * self.hidden * (3 if self.gated else 2)
        return self.layers * (projections + mlp) + self.width * self.vocabulary

    def attended(self, length: float) -> float:
        """What attention adds to N where a token's row has this length (the mean over tokens, not over rows): a token
        in its middle looks at half of it, two products of two FLOPs each, and 2 FLOPs are one N."""
        return self.layers * self.attention * length

    def kv_bytes(self, precision: str) -> int:
        """That one token leaves in the cache."""
        return 2 * self.layers * self.cached * BYTES[precision]


def passes(method: str, epochs: int = 1) -> int:
    """FLOPs of a useful token as a multiple of N.

    dpo: 2 for the reference, 6 to train. grpo, rloo and online-dpo: 2 to generate, 2 for the reference, 6 to train
    (with LoRA 4, as frozen weights have no gradient).
    ppo: 8 to generate and for reference, critic and judge, then 6 each to train policy and critic, every epoch.
    """
    fixed = {"sft": 6, "reward": 6, "dpo": 8, "grpo": 10, "rloo": 10, "online-dpo": 10, "generate": 2, "grpo-lora": 8}
    return 8 + 12 * epochs if method == "ppo" else fixed[method]


def training_flops(size: Size, method: str, *, epochs: int = 1, attention_length: float = 0.0) -> float:
    """FLOPs of one token of a step."""
    return passes(method, epochs) * (size.parameters + size.attended(attention_length))


@dataclass(frozen=True)
class Decoding:
    """Facts of a generation line on which its floor depends, each for one new token."""

    prompt_tokens: float
    """Prompt tokens that must be computed: those of a prompt count once for all its samples."""
    context: float
    """Tokens that attention looks at, on average."""
    batch: float
    """Sequences that share one reading of the weights, at best."""

    def flops(self, size: Size) -> float:
        """Of a new token: its own forward pass and its share of the prompts'."""
        return 2 * size.parameters * (1 + self.prompt_tokens)

    def bytes(self, size: Size, precision: str) -> float:
        """That must be read for a new token: its share of the weights, and its keys and values."""
        return size.parameters * BYTES[precision] / self.batch + self.context * size.kv_bytes(precision)


@dataclass(frozen=True)
class Peak:
    """The best that this machine did in this run, at one precision and number of threads."""

    flops: float
    """FLOP/s of the best matrix product as torch does it by itself."""
    bandwidth: float
    """Bytes/s of the best read of as much memory as weights take."""
    packed: float = 0.0
    """FLOP/s of the best product by oneDNN with a weight laid out beforehand, which float32 gets only if asked for."""

    def better(self, other: Peak) -> Peak:
        """The best of both, figure by figure."""
        return Peak(*(max(getattr(self, name), getattr(other, name)) for name in ("flops", "bandwidth", "packed")))

    def seconds(self, flops: float, read: float = 0.0) -> float:
        """The least time for so many FLOPs and bytes, if they overlap perfectly."""
        return max(flops / max(self.flops, self.packed), read / self.bandwidth)


def share(rate: float, seconds_a_token: float) -> float:
    """How much of the floor a rate reaches: 1 is the floor itself."""
    return rate * seconds_a_token


def ratio(record: dict[str, Any], theirs: dict[str, Any]) -> float | None:
    """How many times as fast ours is: of rates, each times the work of its tokens, or of seconds."""
    ours = record["ours"]
    if "value" not in ours or "value" not in theirs:
        return None
    if record["unit"] == "s":
        return float(theirs["value"] / ours["value"])
    weight = ours["work"]["flops"] / theirs["work"]["flops"]
    return float(ours["value"] / theirs["value"] * weight)


def floors_of(
    record: dict[str, Any], peaks: dict[str, Any], *sides: dict[str, Any]
) -> Iterator[tuple[float, float] | None]:
    """How much of the floor each side reaches: by the rate of torch's own product, and by the best one's. None where a
    line has no floor."""
    known = record.get("peak") or peaks.get(record["precision"])
    for side in sides:
        if "value" not in side or "work" not in side or known is None:
            yield None
            continue
        best = Peak(**known)
        flops, read = side["work"]["flops"], side["work"]["bytes"]
        plain, packed = (share(side["value"], peak.seconds(flops, read)) for peak in (replace(best, packed=0.0), best))
        yield plain, packed
