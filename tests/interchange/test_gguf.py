"""GGUF files: a model that is written and read back is the same to the last bit, and transformers reads the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, models, trainers

from plaudit import load_settings
from plaudit.commands.generate import generate
from plaudit.evaluate.settings import GenerateSettings
from plaudit.interchange import gguf as form
from plaudit.interchange.export import folder_from_gguf
from plaudit.interchange.gguf import GGUFError
from plaudit.interchange.reading import folder_of, splitter, write_folder
from plaudit.interchange.writing import write_gguf
from plaudit.models.config import RopeScaling
from plaudit.models.decoder import rotary_frequencies
from plaudit.models.families import read_config
from plaudit.models.files import read_json, write_json
from plaudit.models.folders import local_folder
from plaudit.models.load import fresh_model, save_model
from plaudit.models.tokenizer import load_tokenizer
from plaudit.settings.tree import SettingsError

gguf = pytest.importorskip("gguf")

Recipe = Callable[..., dict[str, Any]]

TEXTS = (
    "Two and two, isn't it?  12345 of 7\n\n",
    " leading, trailing \t tabs ",
    "Füße ﬁt e\u0301 日本 🙂",
    "<|user|>a<tool>b<|end|>",
)
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {**form.LLAMA3, "factor": 8.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 10_000.0},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True, "rope_theta": 500_000.0},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama 3.1": {"model_type": "llama", "rope_theta": 500_000.0, "rope_scaling": LLAMA3, "head_dim": 16},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 32},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1_000_000.0, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 128},  # the only size that transformers' reader takes
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAUDIT_CACHE", str(tmp_path / "cache"))


def tokenizer_of(pre: str) -> Tokenizer:
    """A byte-level tokenizer that splits in the way of `pre`, with a few merges and added tokens."""
    plain = splitter(form.SPLITTINGS[pre], {}, [])
    plain.model = models.BPE(ignore_merges=form.SPLITTINGS[pre].whole)
    alphabet = sorted({*map(chr, range(33, 127)), *map(chr, range(161, 173)), *map(chr, range(174, 324))})
    plain.train_from_iterator(
        TEXTS * 8, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    special = [AddedToken(token, normalized=False, special=True) for token in ("<|begin|>", "<|user|>", "<|end|>")]
    plain.add_special_tokens(special)
    plain.add_tokens([AddedToken("<tool>", normalized=False)])
    return plain


def folder_with(tmp_path: Path, keys: dict[str, Any], pre: str = "qwen2", *, seed: int = 3) -> Path:
    """A saved model of fresh weights with a tokenizer, whose norms and biases are no longer ones and zeros."""
    folder, tokenizer = tmp_path / "model", tokenizer_of(pre)
    model = fresh_model({**SIZES, **keys}, vocab_size=tokenizer.get_vocab_size() + 3, seed=seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_model(model, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    end, begin = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<|begin|>")
    own = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **own})
    write_json(folder / "generation_config.json", {"eos_token_id": end, "bos_token_id": begin})
    write_json(
        folder / "config.json", {**read_json(folder / "config.json"), "eos_token_id": end, "bos_token_id": begin}
    )
    return folder


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_a_model_that_is_written_and_read_back_is_the_same(tmp_path: Path, name: str) -> None:
    folder = folder_with(tmp_path, MODELS[name])
    write_gguf(folder, tmp_path / "m.gguf", type="f32")
    back = local_folder(str(tmp_path / "m.gguf"))
    before, after = load_file(folder / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    was, now = (read_config(read_json(one / "config.json")) for one in (folder, back))
    assert now == replace(was, family="llama" if name == "mistral" else was.family)


@pytest.mark.parametrize("name", ["llama, tied", "llama 3.1", "qwen2", "qwen3"])
@pytest.mark.slow
def test_transformers_reads_the_same_model(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = folder_with(tmp_path, MODELS[name])
    write_gguf(folder, tmp_path / "m.gguf", type="f32")
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    if name == "llama 3.1":  # it takes the frequencies as unscaled, and the weights as they are
        theirs.model.rotary_emb = ours.model.rotary_emb
    tokens = torch.arange(40)[None] % ours.config.vocab_size
    assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("pre", form.SPLITTINGS)
def test_a_tokenizer_that_is_written_and_read_back_gives_the_same_tokens(tmp_path: Path, pre: str) -> None:
    folder = folder_with(tmp_path, MODELS["llama"], pre)
    write_gguf(folder, tmp_path / "m.gguf")
    back = folder_of(tmp_path / "m.gguf")
    was, now = load_tokenizer(str(folder)), load_tokenizer(str(back))
    for text in TEXTS:
        assert was(text).input_ids == now(text).input_ids
        assert was.decode(was(text).input_ids) == now.decode(now(text).input_ids)
    assert was.get_vocab() == now.get_vocab()
    assert now.chat_template == TEMPLATE
    assert (now.bos_token, now.eos_token) == ("<|begin|>", "<|end|>")


def test_each_way_to_split_differs_from_the_others() -> None:
    """Otherwise a wrong name would go unnoticed."""
    text = "It's 12345 e\u0301  x"
    words = {
        pre: tuple(piece for piece, _ in splitter(way, {}, []).pre_tokenizer.pre_tokenize_str(text))
        for pre, way in form.SPLITTINGS.items()
    }
    assert words["gpt-2"] == ("It", "'s", "Ġ12345", "Ġe", "Ìģ", "Ġ", "Ġx")
    assert words["smollm"] == ("It", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġe", "Ìģ", "Ġ", "Ġx")
    assert words["llama-bpe"] == ("It", "'s", "Ġ", "123", "45", "Ġe", "Ìģ", "Ġ", "Ġx")
    assert words["qwen2"] == ("It", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġe", "Ìģ", "Ġ", "Ġx")


def test_rows_of_query_and_key_change_their_order() -> None:
    """Two heads of four: numbers 0 and 2, 1 and 3 turn together. GGUF has them side by side."""
    rows = np.arange(8)[:, None] * np.ones((1, 3))
    assert form.paired(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert np.array_equal(form.halved(form.paired(rows, 2), 2), rows)
    assert form.paired(np.arange(4), 1).tolist() == [0, 2, 1, 3]


def test_frequencies_of_llama_3_are_divided_as_the_decoder_divides_them() -> None:
    keys = {**SIZES, "model_type": "llama", "vocab_size": 8, "rope_theta": 500_000.0, "head_dim": 128}
    plain = read_config(keys)
    scaled = read_config({**keys, "rope_scaling": LLAMA3})
    assert isinstance(scaled.rope_scaling, RopeScaling)
    ratio = (rotary_frequencies(plain) / rotary_frequencies(scaled)).numpy()
    factors = form.stretches(LLAMA3, 500_000.0, 128)
    assert np.allclose(factors, ratio, rtol=1e-5)
    assert factors[0] == 1.0  # turns within the old context many times
    assert factors[-1] == 8.0  # never turns within it


def test_8_bits_are_rounded_by_blocks_of_32(tmp_path: Path) -> None:
    """A block's largest number is 127 steps: whole numbers up to 127 stay, and 0.4 of a step goes."""
    folder = folder_with(tmp_path, MODELS["llama"])
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    rows = torch.arange(-127, 128).repeat(64 * 96)[: 64 * 96].reshape(64, 96).float()
    rows[:, ::32] = 127.0
    from safetensors.torch import save_file

    save_file({**weights, name: rows + 0.4}, folder / "model.safetensors", metadata={"format": "pt"})
    write_gguf(folder, tmp_path / "m.gguf", type="q8_0")
    back = load_file(folder_of(tmp_path / "m.gguf") / "model.safetensors")
    step = 127.4 / 127
    assert (back[name] / step - torch.round((rows + 0.4) / step)).abs().max() < 0.05
    assert torch.equal(back["model.norm.weight"], weights["model.norm.weight"])  # norms are never rounded
    assert (back[name] - rows - 0.4).abs().max() > 0.3


def test_16_bits_are_kept_as_they_are(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, MODELS["qwen2"])
    for type, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        write_gguf(folder, tmp_path / f"{type}.gguf", type=type)
        back = load_file(folder_of(tmp_path / f"{type}.gguf") / "model.safetensors")
        name = "model.layers.1.self_attn.q_proj.weight"
        assert back[name].dtype == dtype
        assert torch.equal(back[name], load_file(folder / "model.safetensors")[name].to(dtype))


def test_a_file_is_read_once_and_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(folder_with(tmp_path, MODELS["llama"]), file)
    first = folder_of(file)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert folder_of(file) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    write_gguf(folder_with(tmp_path, MODELS["llama"], seed=4), file)
    assert folder_of(file) != first


def test_a_file_is_a_model_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_with(tmp_path, MODELS["llama"])
    write_gguf(folder, tmp_path / "m.gguf", type="f32")
    said = []
    for model in (folder, tmp_path / "m.gguf"):
        settings = GenerateSettings(model=str(model))
        ((_, (answer,)),) = generate(settings, ["Two and two"])
        said.append(answer.tokens)
    assert said[0] == said[1]


def test_a_quantised_file_says_so(tmp_path: Path) -> None:
    write_gguf(folder_with(tmp_path, MODELS["llama"]), tmp_path / "m.gguf", type="q8_0")
    text = folder_from_gguf(str(tmp_path / "m.gguf"), str(tmp_path / "out"))
    assert "quantised (Q8_0)" in text
    assert (tmp_path / "out" / "model.safetensors").exists()
    with pytest.raises(ValueError, match="exists already"):
        folder_from_gguf(str(tmp_path / "m.gguf"), str(tmp_path / "out"))


def sentencepiece_values() -> dict[str, Any]:
    """Metadata of a SentencePiece tokenizer: a piece of a higher score is merged first."""
    plain = ["▁", "a", "b", "c", "ab", "bc", "▁ab", "▁a"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *plain]
    kinds = [form.UNKNOWN, form.CONTROL, form.CONTROL, *[form.BYTE] * 256, *[form.NORMAL] * len(plain)]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0]
    ids = {"ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "ggml.unknown_token_id": 0}
    return {"ggml.model": "llama", "ggml.tokens": tokens, "ggml.token_type": kinds, "ggml.scores": scores, **ids}


def rewritten(source: Path, target: Path, changes: dict[str, Any]) -> Path:
    """Copy a GGUF file with other metadata (None: without the key)."""
    reader = gguf.GGUFReader(source)
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    kinds = {key: field.types for key, field in reader.fields.items()}
    writer = gguf.GGUFWriter(target, changes.get("general.architecture", values["general.architecture"]))
    for key, value in {**values, **changes}.items():
        if value is None or key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif key in kinds and key not in changes:
            writer.add_key_value(key, value, kinds[key][0])
        else:
            adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            adds[type(value)](key, value)
    for one in reader.tensors:
        writer.add_tensor(one.name, np.array(one.data), raw_dtype=one.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    """abc: bc (-1) goes before ab (-2). A text begins with a space, and what no piece has is written in bytes."""
    write_gguf(folder_with(tmp_path, {**MODELS["llama"]}), tmp_path / "m.gguf", type="f32")
    values = {f"tokenizer.{key}": value for key, value in sentencepiece_values().items()}
    gone = {"tokenizer.ggml.pre": None, "tokenizer.ggml.merges": None, "tokenizer.ggml.add_bos_token": None}
    file = rewritten(tmp_path / "m.gguf", tmp_path / "s.gguf", {**values, **gone})
    tokenizer = load_tokenizer(str(folder_of(file)))
    names = {token: number for number, token in enumerate(sentencepiece_values()["ggml.tokens"])}
    for text, pieces in (
        ("ab", ["<s>", "▁ab"]),
        ("abc", ["<s>", "▁a", "bc"]),
        ("ab ab", ["<s>", "▁ab", "▁ab"]),
        ("é", ["<s>", "▁", "<0xC3>", "<0xA9>"]),
    ):
        assert tokenizer(text).input_ids == [names[piece] for piece in pieces]
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def changed(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Files that cannot be read exactly, with a word of the reason."""
    whole = tmp_path / "whole.gguf"
    write_gguf(folder_with(tmp_path, MODELS["llama"]), whole, type="f32")
    for number, (changes, word) in enumerate(
        [
            ({"general.architecture": "gemma3"}, "architecture='gemma3'"),
            ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type='yarn'"),
            ({"llama.expert_count": 8}, "llama.expert_count=8"),
            ({"llama.attention.value_length": 99}, "several sizes"),
            ({"llama.block_count": None}, "lacks llama.block_count"),
            ({"tokenizer.ggml.pre": "viking"}, "pre='viking'"),
            ({"tokenizer.ggml.model": "bert"}, "model='bert'"),
        ]
    ):
        yield rewritten(whole, tmp_path / f"{number}.gguf", changes), word
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:20_000])
    yield cut, "not a whole GGUF"
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    yield text, "not a whole GGUF"


def test_what_cannot_be_read_exactly_is_refused_with_a_reason(tmp_path: Path) -> None:
    for file, word in changed(tmp_path):
        with pytest.raises(GGUFError) as caught:
            folder_of(file)
        assert word in str(caught.value)
        assert str(file) in str(caught.value)
    assert not list((tmp_path / "cache" / "gguf").iterdir())  # nothing half-written stays


def test_frequencies_that_are_not_llama_3s_are_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {**MODELS["llama 3.1"], "rope_scaling": {**LLAMA3, "factor": 5.0}})
    write_gguf(folder, tmp_path / "m.gguf")
    with pytest.raises(GGUFError, match="not Llama 3's"):
        folder_of(tmp_path / "m.gguf")


def test_a_tensor_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, MODELS["llama"])
    write_gguf(folder, tmp_path / "m.gguf", type="f32")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    place = [one.name for one in reader.tensors].index("blk.0.ffn_up.weight")
    reader.tensors[place] = reader.tensors[place]._replace(name="blk.0.attn_sinks.weight")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", lambda file: reader)
        with pytest.raises(GGUFError, match="attn_sinks"):
            write_folder(tmp_path / "m.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}, "model_type='gpt2'"),
        ({**SIZES, "model_type": "mistral", "sliding_window": 8}, "model_type='mistral'"),
    ],
)
def test_a_model_without_an_exact_form_is_not_written(tmp_path: Path, keys: dict[str, Any], word: str) -> None:
    folder = tmp_path / "model"
    save_model(fresh_model(keys, vocab_size=400), folder)
    with pytest.raises(GGUFError) as caught:
        write_gguf(folder, tmp_path / "m.gguf")
    assert word in str(caught.value)
    assert not (tmp_path / "m.gguf").exists()


def test_a_tokenizer_without_a_name_is_not_written(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, MODELS["llama"])
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(GGUFError, match="way to split texts"):
        write_gguf(folder, tmp_path / "m.gguf")


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    (tmp_path / "m.gguf").write_text("")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(GGUFError, match="pip install"):
        folder_of(tmp_path / "m.gguf")


def test_a_mesh_that_cannot_cut_the_file_is_refused_before_the_run(tmp_path: Path, make_recipe: Recipe) -> None:
    write_gguf(folder_with(tmp_path, MODELS["llama"]), tmp_path / "m.gguf")
    recipe = make_recipe("sft", tmp_path, runtime={"kind": "ray", "mesh": {"tensor": 5}})
    recipe["model"] = {"path": str(tmp_path / "m.gguf")}
    with pytest.raises(SettingsError, match="tensor=5 does not"):
        load_settings(recipe)
