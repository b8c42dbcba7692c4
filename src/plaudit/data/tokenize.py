"""Records to token rows: which tokens there are, and which of them are trained.

    Demonstration -> Row, ...      prompt masked, answer and its end token trained
    Preference    -> Row, Row, ... chosen and rejected next to each other
    Question      -> Prompt

Prompt and answer are tokenised apart and joined. Tokenised as one text, a token could span the seam: the trained
prompt would then end in other tokens than the prompt that the policy is asked with, and where the answer begins would
be a guess. So SFT, preferences and prompts share `encode_prompts`, and never differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from plaudit.data.chat import chat_template, other_end, render
from plaudit.data.fields import DataError, Message
from plaudit.data.formats import Demonstration, Preference, Question
from plaudit.data.report import Tally
from plaudit.data.settings import DataSettings
from plaudit.types import Prompt, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = tuple[int, ...]
AT_ONCE = 512
"""Texts in one call of a tokenizer, which holds some 130 bytes for each of their tokens until it returns."""
RecordT = TypeVar("RecordT", Demonstration, Preference, Question)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's tokens, the end token among them unless it was cut off."""

    tokens: Tokens
    truncated: bool


def demonstration_rows(
    records: Sequence[Demonstration],
    tokenizer: PreTrainedTokenizerBase,
    settings: DataSettings,
    *,
    tally: Tally | None = None,
    first_group: int = 0,
) -> list[Row]:
    """The rows of each record, of which `group` counts those that have any: one, or with `settings.every_turn` one for
    every assistant turn of a chat, with all before it as its prompt."""
    tally = tally or Tally(source="")
    turns = _turns if settings.every_turn else _last_turn
    records, texts = prompt_texts(records, tokenizer, settings, tally, turns)
    shown = [turn for record in records for turn in turns(record)]
    asked = iter(encode_prompts(texts, tokenizer))
    answers = iter(encode_texts([turn.completion for turn in shown], tokenizer))
    end, bos = end_token(tokenizer), first_token(tokenizer)
    rows: list[Row] = []
    group = first_group
    for record in records:
        kept, left_out = len(rows), Counter[str]()
        for turn in turns(record):
            prompt, tokens = next(asked), next(answers)
            fitted = fit_prompt(prompt, settings, left_out, where=turn.where, bos=bos)
            if fitted is None:
                continue
            answer = fit_answer(tokens, end, settings.max_tokens - len(fitted), settings, where=turn.where)
            if isinstance(answer, str):
                left_out[answer] += 1
                continue
            tally.truncated_prompts += len(fitted) < len(prompt)
            tally.prompt_lengths.append(len(fitted))
            rows.append(_row(fitted, answer, tally, group=group))
        if len(rows) > kept:
            tally.items += 1
            tally.turns_dropped += left_out
            group += 1
        else:
            tally.dropped[next(iter(left_out))] += 1
    return rows


def _last_turn(record: Demonstration) -> tuple[Demonstration, ...]:
    """The answer of a record, which is a chat's last turn."""
    return (record,)


def _turns(record: Demonstration) -> tuple[Demonstration, ...]:
    """Every assistant turn with some text, and the answer, each as a demonstration."""
    said = [i for i, turn in enumerate(record.messages) if turn["role"] == "assistant" and turn["content"].strip()]
    before = (
        replace(record, messages=record.messages[:i], completion=record.messages[i]["content"]) for i in said if i
    )
    return (*before, record)


def preference_rows(
    records: Sequence[Preference],
    tokenizer: PreTrainedTokenizerBase,
    settings: DataSettings,
    *,
    tally: Tally | None = None,
    first_group: int = 0,
) -> list[Row]:
    """Chosen at 2i, rejected at 2i + 1; `group` counts prompts, `weight` is 1 / pairs of the prompt."""
    tally = tally or Tally(source="")
    end, bos = end_token(tokenizer), first_token(tokenizer)
    records, texts = prompt_texts(records, tokenizer, settings, tally)
    asked = encode_prompts(texts, tokenizer)
    answered = [text for record in records for pair in record.pairs for text in (pair.chosen, pair.rejected)]
    encoded = iter(encode_texts(answered, tokenizer))
    rows: list[Row] = []
    group = first_group
    for record, prompt in zip(records, asked, strict=True):
        answers = [(next(encoded), next(encoded)) for _ in record.pairs]
        fitted = fit_prompt(prompt, settings, tally.dropped, where=record.where, bos=bos)
        if fitted is None:
            continue
        room = settings.max_tokens - len(fitted)
        kept: list[tuple[Answer, Answer, float]] = []
        for pair, (chosen, rejected) in zip(record.pairs, answers, strict=True):
            fit = _fit_pair(chosen, rejected, end, room, settings, where=record.where)
            if isinstance(fit, str):
                tally.pairs_dropped[fit] += 1
            elif len(kept) == settings.max_pairs_per_prompt:
                tally.pairs_dropped[f"beyond max_pairs_per_prompt={settings.max_pairs_per_prompt}"] += 1
            else:
                kept.append((*fit, pair.margin))
        if not kept:
            tally.dropped["no usable pair"] += 1
            continue
        for one, other, margin in kept:
            rows.append(_row(fitted, one, tally, group=group, weight=1 / len(kept), margin=margin))
            rows.append(_row(fitted, other, tally, group=group, weight=1 / len(kept)))
        tally.truncated_prompts += len(fitted) < len(prompt)
        tally.prompt_lengths.append(len(fitted))
        tally.pairs += len(kept)
        tally.items += 1
        group += 1
    return rows


def prompts(
    records: Sequence[Question],
    tokenizer: PreTrainedTokenizerBase,
    settings: DataSettings,
    *,
    tally: Tally | None = None,
) -> list[Prompt]:
    """One prompt a record; `text` is what the policy reads, `id` where the record stands."""
    tally = tally or Tally(source="")
    records, texts = prompt_texts(records, tokenizer, settings, tally)
    asked, bos = encode_prompts(texts, tokenizer), first_token(tokenizer)
    kept: list[Prompt] = []
    for record, text, tokens in zip(records, texts, asked, strict=True):
        fitted = fit_prompt(tokens, settings, tally.dropped, where=record.where, bos=bos)
        if fitted is None:
            continue
        kept.append(
            Prompt(
                id=record.where,
                text=text if len(fitted) == len(tokens) else _told(fitted, tokenizer, bos),
                tokens=fitted,
                answer=record.answer,
                messages=chat_of(record.prompt, record.messages, settings),
                source=tally.source,
                extra=record.extra,
            )
        )
        tally.truncated_prompts += len(fitted) < len(tokens)
        tally.items += 1
        tally.prompt_lengths.append(len(fitted))
    return kept


def _told(tokens: Tokens, tokenizer: PreTrainedTokenizerBase, bos: int | None) -> str:
    """The text of a prompt that lost its beginning, without the BOS that `encode_prompt` would put in front of it."""
    own = tokens[1:] if tokens[0] == bos else tokens
    return str(tokenizer.decode(list(own), clean_up_tokenization_spaces=False))


def encode_prompts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    """The tokens that ask, never none: BOS in front where the tokenizer puts one or the prompt is empty."""
    return _with_first_token(encode_texts(texts, tokenizer), tokenizer)


def encode_prompt(prompt: str, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Tokens of one rendered prompt, as everywhere else."""
    return encode_prompts([prompt], tokenizer)[0]


def prompt_texts(
    records: Sequence[RecordT],
    tokenizer: PreTrainedTokenizerBase,
    settings: DataSettings,
    tally: Tally,
    turns: Callable[[RecordT], tuple[RecordT, ...]] = lambda record: (record,),
) -> tuple[list[RecordT], list[str]]:
    """What each record asks, and each of its `turns`, as text: a rendered chat, or its prompt in the prompt template. A
    record whose chat the template refuses is a bad row and left out."""
    template = chat_template(settings.chat_template)
    asked: list[RecordT] = []
    texts: list[str] = []
    for record in records:
        try:
            texts += [_prompt_text(turn, tokenizer, settings, template) for turn in turns(record)]
        except DataError as error:
            tally.skip(error)
        else:
            asked.append(record)
    if any(chat_of(record.prompt, record.messages, settings) for record in asked[:1]):
        tally.template_end = other_end(tokenizer, template=template)
    return asked, texts


def _prompt_text(
    record: Demonstration | Preference | Question,
    tokenizer: PreTrainedTokenizerBase,
    settings: DataSettings,
    template: str | None,
) -> str:
    chat = chat_of(record.prompt, record.messages, settings)
    if chat:
        return render(chat, tokenizer, template=template, where=record.where)
    if settings.prompt_template is not None:
        return settings.prompt_template.replace("{prompt}", record.prompt)
    return record.prompt


def chat_of(prompt: str, messages: Sequence[Message], settings: DataSettings) -> tuple[Message, ...]:
    """The chat to render: the record's own, or its text as a user turn where the settings want chats; else none."""
    turns = tuple(messages)
    if not turns and prompt and (settings.as_chat or settings.system is not None):
        wrapped = prompt if settings.prompt_template is None else settings.prompt_template.replace("{prompt}", prompt)
        turns = ({"role": "user", "content": wrapped},)
    if turns and settings.system is not None and turns[0]["role"] != "system":
        turns = ({"role": "system", "content": settings.system}, *turns)
    return turns


def encode_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    """Tokens of texts as they stand, nothing added."""
    tokens: list[Tokens] = []
    for start in range(0, len(texts), AT_ONCE):
        part = list(texts[start : start + AT_ONCE])
        encoded = tokenizer(part, add_special_tokens=False, return_attention_mask=False, verbose=False)
        tokens += [tuple(ids) for ids in encoded["input_ids"]]
    return tokens


def first_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The BOS token if this tokenizer puts it in front of texts, as Llama's do and GPT-2's does not."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return None
    added = list(tokenizer("a", verbose=False)["input_ids"])
    return int(bos) if getattr(tokenizer, "add_bos_token", False) or added[:1] == [bos] else None


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError("The tokenizer has no eos_token, so no answer could ever end. Set tokenizer.eos_token.")
    return int(end)


def fit_prompt(
    tokens: Tokens, settings: DataSettings, dropped: Counter[str], *, where: str, bos: int | None
) -> Tokens | None:
    """The prompt within its limit: without its beginning (BOS stays), or None where it is `dropped`, which is
    counted."""
    limit = settings.max_prompt_tokens
    if len(tokens) <= limit:
        return tokens
    _refuse_overlong(f"the prompt has {len(tokens)} tokens, data.max_prompt_tokens={limit}", settings, where)
    if settings.overlong == "drop":
        dropped["prompt too long"] += 1
        return None
    if tokens[0] == bos and limit > 1:
        return (tokens[0], *tokens[len(tokens) - limit + 1 :])
    return tokens[len(tokens) - limit :]


def fit_answer(tokens: Tokens, end: int, room: int, settings: DataSettings, *, where: str) -> Answer | str:
    """The answer with its end token, cut where there is no room; or the reason why it cannot be used.

    Only an answer that is whole ends in the end token: a cut one with it would teach to stop mid-sentence.
    """
    if tokens and tokens[-1] == end:
        tokens = tokens[:-1]
    if end in tokens:
        return "end token inside the answer"
    if len(tokens) < room:
        return Answer((*tokens, end), truncated=False)
    _refuse_overlong(
        f"the answer has {len(tokens) + 1} tokens, and data.max_tokens={settings.max_tokens} leaves {max(room, 0)}",
        settings,
        where,
    )
    if settings.overlong == "drop":
        return "answer too long"
    if room < 1:
        return "prompt leaves no room for an answer"
    return Answer(tokens[:room], truncated=True)


def _fit_pair(
    chosen: Tokens, rejected: Tokens, end: int, room: int, settings: DataSettings, *, where: str
) -> tuple[Answer, Answer] | str:
    if chosen == rejected:
        return "chosen equals rejected"
    one = fit_answer(chosen, end, room, settings, where=where)
    if isinstance(one, str):
        return one
    other = fit_answer(rejected, end, room, settings, where=where)
    if isinstance(other, str):
        return other
    if one.tokens == other.tokens:
        return "chosen equals rejected once cut"
    return one, other


def _row(prompt: Tokens, answer: Answer, tally: Tally, *, group: int, weight: float = 1.0, margin: float = 0.0) -> Row:
    tally.rows += 1
    tally.truncated_completions += answer.truncated
    tally.completion_lengths.append(len(answer.tokens))
    tally.trained_tokens += len(answer.tokens)
    return Row(
        tokens=prompt + answer.tokens,
        trainable=(False,) * len(prompt) + (True,) * len(answer.tokens),
        group=group,
        weight=weight,
        margin=margin,
        truncated=answer.truncated,
    )


def _with_first_token(encoded: Sequence[Tokens], tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    bos = first_token(tokenizer)
    # A row's first token is never trained, so an empty prompt needs one; GPT-2's tokenizer opens with the end token.
    opening = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    result: list[Tokens] = []
    for tokens in encoded:
        if bos is not None and tokens[:1] != (bos,):  # a chat template may have written it already
            tokens = (bos, *tokens)
        if not tokens:
            if opening is None:
                raise DataError("A prompt is empty and the tokenizer has neither bos_token nor eos_token to open with.")
            tokens = (opening,)
        result.append(tokens)
    return result


def _refuse_overlong(what: str, settings: DataSettings, where: str) -> None:
    if settings.overlong == "error":
        raise DataError(f"{what}. Raise the limit, or set data.overlong to truncate or drop.", where)
