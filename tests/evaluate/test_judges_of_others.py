"""Judges of others: checkpoints that transformers wrote, read where transformers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from plaudit.evaluate.judge import Judge
from plaudit.models.load import load_tokenizer
from plaudit.runtime.coroutines import finished
from plaudit.types import Completion, Finish, Prompt

if TYPE_CHECKING:
    from conftest import Task

ROTARY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
SIZES = {"gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, "llama": ROTARY, "gemma2": ROTARY}
"""Two families that the native decoder computes, one that goes through transformers: its pad is 0 unless it says so."""


def written_by_transformers(folder: Path, family: str, tokenizer: Any, **pad: int | None) -> Any:
    ids = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, **pad}
    torch.manual_seed(3)
    keys = {**SIZES[family], **ids, "num_labels": 1, "initializer_range": 0.3}
    config = AutoConfig.for_model(family, **keys)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def theirs(model: Any, sequences: list[tuple[int, ...]]) -> list[float]:
    return [model(torch.tensor([sequence])).logits.item() for sequence in sequences]


@torch.no_grad()
def theirs_padded(model: Any, sequences: list[tuple[int, ...]], *, left: bool) -> list[float]:
    pad, longest = model.config.pad_token_id, max(map(len, sequences))
    rows, mask = [], []
    for sequence in sequences:
        fill, real = (pad,) * (longest - len(sequence)), (1,) * len(sequence)
        rows.append((*fill, *sequence) if left else (*sequence, *fill))
        mask.append((*(0,) * len(fill), *real) if left else (*real, *(0,) * len(fill)))
    found: list[float] = model(torch.tensor(rows), attention_mask=torch.tensor(mask)).logits[:, 0].tolist()
    return found


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("pad", ["the end", "another", "none", "not named"])
@pytest.mark.slow
def test_judges_of_others_are_read_as_transformers_reads(pad: str, family: str, task: Task, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(task.files.tokenizer))
    end = tokenizer.eos_token_id
    named = {"the end": {"pad_token_id": end}, "another": {"pad_token_id": 7}, "none": {"pad_token_id": None}}
    model = written_by_transformers(tmp_path, family, tokenizer, **named.get(pad, {}))
    skipped = model.config.pad_token_id
    assert pad != "not named" or skipped == (0 if family == "gemma2" else None)
    judge = Judge.load(str(tmp_path))

    ended = [(5, 9, 11, 12, end), (5, 9, end), (5, 6, 8, 10, 13, 14, end, end)]
    cut = [(5, 9, 11, 12), (5, 9, 13, 8, 6), (end,)]
    of_pads = [] if skipped is None else [(5, 9, skipped, 11, skipped), (skipped, skipped)]
    sequences = [*ended, *cut, *of_pads]
    expected = theirs(model, sequences)
    assert judge.of_sequences(sequences) == pytest.approx(expected, abs=1e-5)
    assert (expected[0] == expected[3]) == (skipped == end)  # the state at 12 in both
    if skipped is not None:
        sides = (False, True) if family != "gpt2" else (False,)  # with pads on the left its positions are others
        for left in sides:
            whole = [s for s in sequences if s not in of_pads]
            assert theirs_padded(model, whole, left=left) == pytest.approx(expected[: len(whole)], abs=1e-4)

    completions = [
        Completion(tokens=t[1:], logprobs=(0.0,) * len(t[1:]), versions=(0,) * len(t[1:]), text="", finish=finish)
        for t, finish in ((ended[0], Finish.EOS), (cut[1], Finish.LENGTH))
    ]
    scores = finished(judge.reward(tokenizer).score(Prompt(id="p", text="", tokens=(5,)), completions))
    assert [score.value for score in scores] == pytest.approx(theirs(model, [ended[0], (*cut[1], end)]), abs=1e-5)
