"""What fits where: GiB a rank for training models that people know, on 8 to 4,096 ranks. By arithmetic, in a second.

python scripts/fits.py      # the table of docs/layout.md
"""

from __future__ import annotations

from typing import Any

from plaudit.models.families import read_config
from plaudit.models.layout import Layout
from plaudit.models.mesh import Mesh, MeshError
from plaudit.preflight.layout import GIB, Model, amounts, extremes


def llama(width: int, layers: int, heads: int, inner: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    family = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256}
    return {**family, **sizes, "intermediate_size": inner, **more}


CONFIGS: dict[str, dict[str, Any]] = {
    "GPT-2": {"model_type": "gpt2"},
    "Llama 3 8B": llama(4096, 32, 32, 14336),
    "Qwen3 32B": llama(5120, 64, 64, 25600, model_type="qwen3", vocab_size=151936, head_dim=128),
    "Llama 3 70B": llama(8192, 80, 64, 28672),
    "Llama 3 405B": llama(16384, 126, 128, 53248),
}
"""As on the hub, as far as sizes go."""
RANKS = (8, 64, 512, 4096)
ROOM = 64 * GIB
"""What a card of 80 GB has for weights and optimizer, if activations and the rest take a fifth."""


def trained(name: str, mesh: Mesh) -> Model:
    """The model's full training in bfloat16. Raises MeshError."""
    layout = Layout(read_config(CONFIGS[name]), "lm", mesh)
    return Model("policy", layout, trained=True, bytes=2)


def cell(name: str, mesh: Mesh) -> str:
    """GiB of the rank with the most; bold where it fits."""
    try:
        model = trained(name, mesh)
    except MeshError:
        return "refused"
    size = sum(amounts([model], extremes([model])[0]).values())
    text = f"{size / GIB:,.1f}"
    return f"**{text}**" if size <= ROOM else text


def main() -> None:
    print("| model | mesh | " + " | ".join(f"{ranks:,} ranks" for ranks in RANKS) + " |")
    print("|---|---|" + "---:|" * len(RANKS))
    for name in CONFIGS:
        for tensor in (1, 8):
            cells = (cell(name, Mesh(data=ranks // tensor, tensor=tensor)) for ranks in RANKS)
            print(f"| {name} | data{' x tensor=8' * (tensor > 1)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
