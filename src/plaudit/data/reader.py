"""Prompts and answers to tokens, the same for training, asking and judging.

    Asked -> (chat template, prompt template) Written -> (tokenizer) Encoded -> fitted prompt, Answer

Prompt and answer are tokenised as one text, with no blank or special token put between them. The policy is asked with
the tokens of the prompt alone. Sometimes these are not the first tokens of the whole text, since one token spans the
end of the prompt. In a plain text that token then belongs to the answer, as in TRL. In a chat, the prompt keeps the
tokens that the policy is asked with, and the answer is tokenised apart, if that gives the same text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from plaudit.data.chat import Chats, shorter
from plaudit.data.fields import SYSTEM_ROLES, DataError, Message, shared_count
from plaudit.data.records import Sample
from plaudit.data.report import Tally
from plaudit.data.settings import DataSettings
from plaudit.data.template import AS_CHAT, adds_bos
from plaudit.support.limits import rust_errors
from plaudit.types import Prompt, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = tuple[int, ...]
AT_ONCE = 512
"""Number of texts in one call of a tokenizer, which takes some 130 bytes a token until it returns."""
PLAIN = {
    True: "plain prompts, asked as a chat's user turn as the checkpoint was trained (data.as_chat=false: as text)",
    False: "plain prompts, asked as text though the tokenizer has a chat template (data.as_chat=true: as chats)",
}
"""Notes for the report if the checkpoint decides whether plain prompts become chats (True) or not (False)."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's tokens, with the end token unless it was cut off."""

    tokens: Tokens
    truncated: bool
    span: int = 0
    """Number of the prompt's last tokens whose text the first answer tokens repeat, since one token spans the end."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A record whose prompt is asked, possibly without the chat's last turns, and the answers to it."""

    record: Sample
    answers: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A prompt and its completions as text; `messages` are the turns of a chat that were rendered."""

    asked: Asked
    prompt: str
    completions: tuple[str, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A prompt and its completions as tokens. `shortened` means that a chat lost turns."""

    text: str
    tokens: Tokens
    completions: tuple[Tokens, ...]
    spans: tuple[int, ...]
    """For each completion, the number of the prompt's last tokens whose text its first tokens repeat."""
    messages: tuple[Message, ...]
    where: str
    shortened: bool = False


Refers = Callable[[str | None], object]
"""Raises ValueError for a prompt's reference answer with which the run's rewards cannot score any completion."""


class Reader:
    """Writes and tokenises records for one tokenizer. `ends` and `tools`: as for `Chats`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: DataSettings,
        ends: Collection[int] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ):
        self.tokenizer = tokenizer
        self.refers: Refers = bool
        self.ends = frozenset((*ends, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])))
        self.bos = int(tokenizer.bos_token_id) if adds_bos(tokenizer) else None
        self.chats = Chats(tokenizer, settings, ends, tools)
        self.settings = replace(settings, as_chat=_asks_with_chats(settings, self.chats))
        is_set = settings.as_chat is not None or settings.prompt_template is not None or settings.system is not None
        self._plain = PLAIN[bool(self.settings.as_chat)] if self.chats.template and not is_set else ""

    def read(
        self, records: Sequence[Sample], asks: Callable[[Sample], Sequence[Asked]], tally: Tally
    ) -> Iterator[tuple[Sample, list[Encoded]]]:
        """Yield each record with its prompts and answers. A record whose chat the template refuses is a bad row."""
        written: list[Written] = []
        readable: list[tuple[Sample, int]] = []
        for record in records:
            try:
                texts = [self.written(asked) for asked in asks(record)]
            except DataError as error:
                tally.skip(error)
            else:
                if self._plain and record.prompt and not record.messages:
                    tally.note(self._plain)
                written += texts
                readable.append((record, len(texts)))
        encoded = iter(self.encoded(written))
        of_chats: list[Written] = [one for one in written if one.messages]
        if of_chats and not tally.chat and self.chats.form is not None:
            tally.chat = self.chats.form.json()
        for record, count in readable:
            yield record, list(islice(encoded, count))

    def written(self, asked: Asked) -> Written:
        """Render the chat, or put the prompt into the prompt template."""
        record = asked.record
        turns = chat_of(record.prompt, record.messages, self.settings)
        if not turns:
            prompt = _wrapped(record.prompt, self.settings)
            texts = tuple(str(answer["content"]) for answer in asked.answers)
            return Written(asked=asked, prompt=prompt, completions=texts, messages=())
        prompt = self.chats.prompt(turns, record.arguments, where=record.where)
        texts = tuple(
            self.chats.completion(prompt, turns, answer, record.arguments, where=record.where)
            for answer in asked.answers
        )
        return Written(asked=asked, prompt=prompt, completions=texts, messages=turns)

    def encoded(self, written: Sequence[Written]) -> list[Encoded]:
        """Tokenise prompts and answers. With data.overlong=truncate, chats that are too long lose their first turns."""
        limit, most = self.settings.max_prompt_tokens, self.settings.max_tokens
        opened = encode_texts(endings([one.prompt for one in written], limit, self.tokenizer), self.tokenizer)
        fitted = [
            self._fitted(one, tokens) if one.messages else (one, _opened(tokens, self.bos, self.tokenizer), False)
            for one, tokens in zip(written, opened, strict=True)
        ]
        asked = endings([one.prompt for one, _, _ in fitted], limit, self.tokenizer)
        texts = [
            prompt + text
            for prompt, (one, _, _) in zip(asked, fitted, strict=True)
            for text in beginnings(one.completions, most, self.tokenizer)
        ]
        whole = iter(encode_texts(texts, self.tokenizer))
        found: list[Encoded] = []
        for (one, tokens, shortened), alone in zip(fitted, opened, strict=True):
            alone = tokens if one.messages else alone  # fewer if the chat lost turns
            answers = [
                after(alone, next(whole), text, self.tokenizer, chat=bool(one.messages)) for text in one.completions
            ]
            found.append(
                Encoded(
                    text=one.prompt,
                    tokens=tokens,
                    completions=tuple(answer for _, answer in answers),
                    spans=tuple(span for span, _ in answers),
                    messages=one.messages,
                    where=one.asked.record.where,
                    shortened=shortened,
                )
            )
        return found

    def _fitted(self, written: Written, tokens: Tokens) -> tuple[Written, Tokens, bool]:
        """Drop first turns of a chat until it fits, none if that cannot help. The flag is True if some were dropped."""
        one, now, limit = written, tokens, self.settings.max_prompt_tokens
        if self.settings.overlong == "truncate":
            while len(now) > limit:
                turns = shorter(one.messages)
                if not turns:
                    return written, tokens, False
                one = self.written(replace(one.asked, record=replace(one.asked.record, messages=turns)))
                now = encode_texts(endings([one.prompt], limit, self.tokenizer), self.tokenizer)[0]
        return one, now, one is not written

    def answer(self, asked: Encoded, number: int, prompt: Tokens) -> Answer | str:
        """Return one of the answers with its end token, cut if the fitted prompt leaves no room for it, or the reason
        why it cannot be used.

        Only a whole answer gets the end token: a cut one with it would teach to stop mid-sentence.
        """
        tokens, span = asked.completions[number], asked.spans[number]
        room = self.settings.max_tokens - len(prompt) + span
        end = self.tokenizer.eos_token_id
        if end is None:
            raise DataError("The tokenizer has no eos_token, so no answer could ever end. Set tokenizer.eos_token.")
        if tokens and tokens[-1] in self.ends:
            tokens, end = tokens[:-1], tokens[-1]
        if not self.ends.isdisjoint(tokens):
            return "end token inside the answer"
        if len(tokens) < room:
            return Answer((*tokens, int(end)), truncated=False, span=span)
        limit = f"data.max_tokens={self.settings.max_tokens} leaves {max(room, 0)}"
        self._refuse(f"the answer has {len(tokens) + 1} tokens, and {limit}", asked)
        if self._overlong(asked) == "drop":
            return "answer too long"
        if room < 1:
            return "prompt leaves no room for an answer"
        return Answer(tokens[:room], truncated=True, span=span)

    def before(self, prompt: Tokens, answer: Answer) -> Tokens:
        """Return the tokens of a fitted prompt in front of an answer: at least one, since a row's first token is not
        trained."""
        return prompt[: len(prompt) - answer.span] or _opened((), self.bos, self.tokenizer)

    def fitting_prompt(self, one: Encoded, dropped: Counter[str]) -> Tokens | None:
        """Return the prompt's tokens; if too long, a text's last ones (after BOS), or None, counted in `dropped`."""
        tokens, limit = one.tokens, self.settings.max_prompt_tokens
        if len(tokens) <= limit:
            return tokens
        self._refuse(f"the prompt has {len(tokens)} tokens, data.max_prompt_tokens={limit}", one)
        if one.messages or self._overlong(one) == "drop":
            dropped["prompt too long"] += 1
            return None
        if tokens[0] == self.bos and limit > 1:
            return (tokens[0], *tokens[len(tokens) - limit + 1 :])
        return tokens[len(tokens) - limit :]

    def _overlong(self, one: Encoded) -> str:
        """Return what happens to a row that is too long; by default chats are dropped and texts truncated."""
        return self.settings.overlong or ("drop" if one.messages else "truncate")

    def _refuse(self, what: str, one: Encoded) -> None:
        if self.settings.overlong == "error":
            raise DataError(f"{what}. Raise the limit, or set data.overlong to truncate or drop.", one.where)


def _asks_with_chats(settings: DataSettings, chats: Chats) -> bool:
    """True if plain prompts are asked as chats: as the settings say, else as the checkpoint was trained."""
    if settings.as_chat is not None:
        return settings.as_chat
    if settings.prompt_template is not None or not chats.template:
        return False
    own = chats.tokenizer.init_kwargs.get(AS_CHAT)
    if own is not None or settings.chat_template is not None:  # a recipe's template is not what it was trained with
        return bool(own)
    return chats.form is not None and bool(chats.form.end)


def parts_of(item: Row | Prompt, tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[str, bool], ...]:
    """Return a row's text in parts, each with True if it is trained; a prompt is one part."""
    trainable: Sequence[int] = (False,) * len(item.tokens) if isinstance(item, Prompt) else item.trainable
    parts: list[tuple[str, bool]] = []
    before = end = 0
    for trained, run in groupby(trainable):
        end += len(list(run))
        text = str(tokenizer.decode(list(item.tokens[:end]), clean_up_tokenization_spaces=False))
        parts.append((text[before:], bool(trained)))
        before = len(text)
    return tuple(parts)


def encode_prompt(prompt: str, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Tokenise one rendered prompt as a policy is asked with it: never empty, with BOS if the tokenizer adds it."""
    bos = int(tokenizer.bos_token_id) if adds_bos(tokenizer) else None
    return _opened(encode_texts([prompt], tokenizer)[0], bos, tokenizer)


def chat_of(prompt: str, messages: Sequence[Message], settings: DataSettings) -> tuple[Message, ...]:
    """Return the chat to render: the record's own, or its text as a user turn if the settings want chats; else ()."""
    turns = tuple(messages)
    if not turns and prompt and (settings.as_chat or settings.system is not None):
        turns = ({"role": "user", "content": _wrapped(prompt, settings)},)
    if turns and settings.system is not None and turns[0]["role"] not in SYSTEM_ROLES:
        turns = ({"role": "system", "content": settings.system}, *turns)
    return turns


def _wrapped(prompt: str, settings: DataSettings) -> str:
    template = settings.prompt_template
    return prompt if template is None else template.replace("{prompt}", prompt)


def beginnings(texts: Sequence[str], limit: int, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Cut the ends of texts that are much too long; what is left still has more than `limit` tokens.

    Tokenising a text of 30 MB would take minutes."""
    return [text if len(text) <= 64 * limit else text[: _most(limit, tokenizer)] for text in texts]


def endings(texts: Sequence[str], limit: int, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """As `beginnings`, but cut the beginnings and keep the ends."""
    return [text if len(text) <= 64 * limit else text[-_most(limit, tokenizer) :] for text in texts]


@lru_cache(maxsize=4)
def _most(limit: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return a number of characters that always takes more than `limit` tokens."""
    return limit * max(map(len, tokenizer.get_vocab())) + 1


def encode_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    """Tokenise texts and add no special tokens."""
    tokens: list[Tokens] = []
    for start in range(0, len(texts), AT_ONCE):
        part = list(texts[start : start + AT_ONCE])
        with rust_errors("the tokenizer"):
            encoded = tokenizer(part, add_special_tokens=False, return_attention_mask=False, verbose=False)
        tokens += [tuple(ids) for ids in encoded["input_ids"]]
    return tokens


def after(
    prompt: Tokens, whole: Tokens, completion: str, tokenizer: PreTrainedTokenizerBase, *, chat: bool
) -> tuple[int, Tokens]:
    """Return how many of the prompt's last tokens differ in the whole text, and the completion's tokens: those of the
    whole text from the first difference on.

    For a chat, return 0 and the completion tokenised apart if that gives the same whole text; tokenizers such as Llama
    2's put a blank before it."""
    shared = shared_count(prompt, whole)
    if chat and shared < len(prompt):
        apart = encode_texts([completion], tokenizer)[0]
        if tokenizer.decode([*prompt, *apart]) == tokenizer.decode(list(whole)):
            return 0, apart
    return len(prompt) - shared, whole[shared:]


def _opened(tokens: Tokens, bos: int | None, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Return the tokens with `bos`, unless None or already there, in front. Without tokens return BOS, or else EOS."""
    if bos is not None and tokens[:1] != (bos,):
        return (bos, *tokens)
    if tokens:
        return tokens
    # A row's first token is never trained, so an empty prompt needs one. GPT-2's tokenizer opens with the end token.
    opening = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if opening is None:
        raise DataError("A prompt is empty and the tokenizer has neither bos_token nor eos_token to open with.")
    return (int(opening),)
