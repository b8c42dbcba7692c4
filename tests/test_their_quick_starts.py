"""TRL's quick starts run as docs/switching.md shows them, but for the hub's models and data; `make parity` has TRL."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from plaudit.tasks.demo import DemoFiles

SECTION = "## Quick starts side by side"
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = 8


def scripts() -> dict[str, str]:
    """The Python of the section, by the trainer that it calls."""
    page = (Path(__file__).parents[1] / "docs" / "switching.md").read_text(encoding="utf-8")
    section = page.partition(SECTION)[2].partition("\n## ")[0]
    found = re.findall(r"```py\n(.*?)```", section, re.DOTALL)
    return {re.search(r"(\w+)Trainer\(", text)[1]: text for text in found}  # type: ignore[index]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def rows(name: str) -> list[dict[str, Any]]:
    """Rows in the columns of a data set of the hub."""
    asked = [turn("user", f"What is {n} + {n}?") for n in range(ROWS)]
    right, wrong = ([turn("assistant", f"\\boxed{{{n + n + off}}}") for n in range(ROWS)] for off in (0, 1))
    if name == "trl-lib/Capybara":
        return [{"messages": [ask, answer]} for ask, answer in zip(asked, right, strict=True)]
    if name == "trl-lib/ultrafeedback_binarized":
        return [{"chosen": [a, b], "rejected": [a, c]} for a, b, c in zip(asked, right, wrong, strict=True)]
    assert name == "trl-lib/DeepMath-103K"
    return [{"prompt": [ask], "solution": f"{n + n}"} for n, ask in enumerate(asked[:2])]


@pytest.fixture(scope="module")
def chat_model(demo: DemoFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the kind that the quick starts name, of a few thousand parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("chat")
    tokenizer = AutoTokenizer.from_pretrained(demo.tokenizer)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.pad_token, tokenizer.chat_template = tokenizer.eos_token, CHAT
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("trainer", ["SFT", "Reward", "DPO", "GRPO"])
def test_quick_start_of_trl_runs(
    trainer: str, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    import datasets
    from transformers import TrainerCallback

    steps = []

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            steps.append(state.global_step)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REPORT_TO", "none")
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: datasets.Dataset.from_list(rows(name)))
    monkeypatch.setattr("transformers.trainer.DEFAULT_CALLBACKS", [Steps])
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)  # TRL's default on CPUs
    code, named = re.subn(r'model="[^"]+"', f"model={json.dumps(str(chat_model))}", scripts()[trainer])
    assert named == 1
    exec(compile(code, "docs/switching.md", "exec"), {})
    assert steps == list(range(1, len(steps) + 1)) != []
