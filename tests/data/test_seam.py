"""Prompt and answer of plain text have the tokens of the whole text, with every kind of tokenizer."""

import pytest
from reading import demonstration_rows, preference_rows, prompts
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from plaudit.data.records import Pair, Sample
from plaudit.data.report import Tally
from plaudit.data.settings import DataSettings

TEXT = ["Answer: 4 Natalia sold 2+2=4 clips.\n\n  return x\n" * 3, "Translation of lations, Answers: 12 def f(x):\n"]
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
BLANK = "▁"


def trained(core, kind=trainers.BpeTrainer, **how):
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet(), BLANK, *"".join(TEXT)})
    how |= {"unk_token": "<unk>"} if kind is trainers.UnigramTrainer else {}
    special = ["<unk>", "<s>", "</s>"]
    core.train_from_iterator(
        TEXT, kind(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False, **how)
    )
    return core


def byte_level(pre=None, **how):
    core = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(**how)
    core.pre_tokenizer = last if pre is None else pre_tokenizers.Sequence([pre, last])
    core.decoder = decoders.ByteLevel()
    return trained(core)


def sentences(model, scheme=None, kind=trainers.BpeTrainer):
    """As SentencePiece; without a scheme of Metaspace the blank is put before a text by the normalizer."""
    core = Tokenizer(model)
    if scheme is None:
        core.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])
        core.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(replacement=BLANK, prepend_scheme=scheme, split=scheme != "first")
        core.decoder = decoders.Metaspace(replacement=BLANK, prepend_scheme=scheme)
    return trained(core, kind)


KINDS = {
    "GPT-2": lambda: byte_level(add_prefix_space=False),
    "a byte-level one with a blank before texts, as RoBERTa's": lambda: byte_level(add_prefix_space=True),
    "Llama 3": lambda: byte_level(
        pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), add_prefix_space=False, use_regex=False
    ),
    "single digits, as SmolLM's": lambda: byte_level(
        pre_tokenizers.Digits(individual_digits=True), add_prefix_space=False
    ),
    "Llama 2, Mistral 7B, Phi 3": lambda: sentences(models.BPE(unk_token="<unk>")),
    "transformers 5's Llama": lambda: sentences(models.BPE(unk_token="<unk>"), "first"),
    "a blank before each part, as T5's": lambda: sentences(models.Unigram(), "always", trainers.UnigramTrainer),
    "no blank before texts, as Gemma's": lambda: sentences(models.BPE(unk_token="<unk>"), "never"),
}
PARTS = [("2+2=", "4"), ("Answer:", " 4"), ("Answer: ", "4"), ("Answer: ", "Natalia"), ("def f(x):", "\n  return x"),
         ("Trans", "lation"), ("clips.\n", "\n  return"), ("", "Natalia"), ("sold", "12 clips")]  # fmt: skip


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_stands_between_prompt_and_answer_and_the_policy_is_asked_with_the_same_tokens(kind, bos):
    core = KINDS[kind]()
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )
    for prompt, answer in PARTS:
        tally = Tally(source="f")
        record = Sample(prompt=prompt, answer=answer, messages=(), where="f:1")
        (row,) = demonstration_rows([record], tokenizer, DataSettings(), tally=tally)
        whole = tuple(tokenizer(prompt + answer, add_special_tokens=False)["input_ids"])
        assert row.tokens in ((*whole, 2), (1, *whole, 2)), (prompt, answer)
        assert tokenizer.decode(row.tokens, skip_special_tokens=True).lstrip() == (prompt + answer).lstrip()
        (asked,) = prompts([Sample(prompt=prompt, messages=(), answer=None, extra={}, where="f:1")],
                           tokenizer, DataSettings())  # fmt: skip
        first = row.trainable.index(True)
        assert all(row.trainable[first:])
        said = tokenizer.decode(row.tokens[first:], skip_special_tokens=True)
        if tally.noted:  # a token spans the seam
            assert row.tokens[: len(asked.tokens)] != asked.tokens
            assert "".join(said.split()).endswith("".join(answer.split()))
        else:
            assert row.tokens[:first] == asked.tokens
            assert said.strip() == answer.strip()
        pair = Sample(prompt=prompt, messages=(), pairs=(Pair(chosen=answer, rejected="\n."),), where="f:1")
        chosen, _ = preference_rows([pair], tokenizer, DataSettings())
        assert (chosen.tokens, chosen.trainable) == (row.tokens, row.trainable)
