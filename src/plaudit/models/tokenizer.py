"""Tokenizers of Hugging Face folders, with the end and pad tokens that training and scoring rely on.

Nothing of ours pads, but transformers' classifiers find a text's last token by skipping pads: a pad that is the end
token makes them read the wrong place, so it must be distinct or absent.
"""

from __future__ import annotations

import hashlib
import logging
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit.models.files import read_json
from plaudit.models.folders import local_folder
from plaudit.support.fields import SettingsError
from plaudit.support.limits import rust_errors

if TYPE_CHECKING:
    from plaudit.models.base import LanguageModel, SpecialTokens

log = logging.getLogger(__name__)

TRIAL = Path(__file__).with_name("trial.py")
SECONDS, MEMORY = 10, 8 << 30
"""Most CPU time and address space of a trial; the largest tokenizers take a tenth of both."""
WORKING: set[str] = set()
"""Digests of tokenizers whose trial (`trial.py`) succeeded in this process."""
PAD = "<|pad|>"
PAD_NAMES = re.compile(r"<\|?pad\|?>|\[PAD\]|<\|.*_?pad(_id)?\|>|<\|reserved_special_token_0\|>", re.IGNORECASE)


PLAIN_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
PLAIN_MODELS = frozenset({None, "gpt2", "llama", "qwen3"})
"""Model types whose tokenizer transformers takes from tokenizer.json as it is. For some others (qwen2) it mistrusts the
file's class and takes one of its own."""


def load_tokenizer(path: str, *, vocab_size: int | None = None, tried: bool = True) -> Any:
    """Load the tokenizer of a folder or hub id. Raises ValueError if it does not load or has no end token.

    Without a pad token distinct from the end token it gets one in memory: a reserved one, the unknown token, or a new
    one if `vocab_size` (default: config.json's) has room; else none. `tried=False`: let `trial.py` try it first.
    """
    folder = local_folder(path)
    if not tried and (digest := _digest(folder)) not in WORKING:
        _try(path, folder)
        WORKING.add(digest)
    try:
        with rust_errors("tokenizers"):
            tokenizer = tokenizer_class(folder).from_pretrained(folder)
            tokenizer("", verbose=False)
    except Exception as error:  # whatever transformers and Rust make of a damaged file
        raise ValueError(f"{path} holds no tokenizer that transformers can load ({error}).") from error
    if not set(tokenizer.get_vocab()) - {str(token) for token in tokenizer.added_tokens_decoder.values()}:
        # without a tokenizer in the folder, transformers makes an empty one of the model's class: no text has tokens
        raise ValueError(
            f"{path} holds no tokenizer: transformers found no vocabulary there. "
            "Save the tokenizer beside the model, or set model.tokenizer to the folder of one."
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer of {path} has no end token, without which no answer ends. "
            "Set eos_token in its tokenizer_config.json."
        )
    if vocab_size is None:
        vocab_size = _read(folder / "config.json").get("vocab_size")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        _set_pad(tokenizer, vocab_size)
    return tokenizer


def _digest(folder: Path) -> str:
    """Return a digest of the files that `trial.py` reads."""
    found = hashlib.sha256()
    for pattern in ("tokenizer*.json", "*.jinja", "*/*.jinja"):
        for path in sorted(folder.glob(pattern)):
            found.update(path.read_bytes() if path.is_file() else b"")
    return found.hexdigest()


def _try(path: str, folder: Path) -> None:
    """Run `trial.py` in another process. Raises ValueError if the tokenizer does not work there."""
    command = [sys.executable, "-I", str(TRIAL), str(folder), str(SECONDS), str(MEMORY)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=10 * SECONDS, check=False)
    except subprocess.TimeoutExpired:
        code, error = -signal.SIGXCPU, ""
    else:
        code, error = done.returncode, done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if code == -signal.SIGXCPU:
        error = f"it takes more than {SECONDS} s for a text of a line, or to compile its chat template"
    elif code < 0 or error in ("", "MemoryError"):
        error = f"it takes more than {MEMORY >> 30} GiB of memory, or crashes"
    if code:
        raise ValueError(f"The tokenizer of {path} does not work: {error}. Copy or save it again, or take another.")


def tokenizer_class(folder: Path) -> Any:
    """Return AutoTokenizer, or the class that it would choose: importing AutoTokenizer takes seconds."""
    declared = _read(folder / "tokenizer_config.json")
    plain = declared.get("tokenizer_class") in PLAIN_CLASSES and "auto_map" not in declared
    if (
        plain
        and (folder / "tokenizer.json").exists()
        and _read(folder / "config.json").get("model_type") in PLAIN_MODELS
    ):
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        return TokenizersBackend
    from transformers import AutoTokenizer

    return AutoTokenizer


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if there is no such file."""
    return read_json(path) if path.exists() else {}


def _set_pad(tokenizer: Any, vocab_size: int | None) -> None:
    taken = {tokenizer.eos_token, tokenizer.bos_token}
    special = [token for token in tokenizer.all_special_tokens if token not in taken]
    added = [
        str(token) for token in tokenizer.added_tokens_decoder.values() if token.special and str(token) not in taken
    ]
    for token in added:
        if PAD_NAMES.fullmatch(token):
            tokenizer.pad_token = token
            return
    if tokenizer.unk_token in special:
        tokenizer.pad_token = tokenizer.unk_token
    elif vocab_size is None or len(tokenizer) < vocab_size:
        tokenizer.add_special_tokens({"pad_token": PAD})
    else:
        tokenizer.pad_token = None
        log.warning(
            "The tokenizer has no pad token and the model's vocabulary no room for one: transformers will score texts "
            "one at a time with reward models saved from it. Nothing here needs a pad."
        )


def check_vocabulary(tokenizer: Any, model: LanguageModel) -> None:
    """Raise ValueError if the tokenizer has ids for which the model has no embedding."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= model.vocab_size:
        raise ValueError(
            f"The tokenizer's ids reach {largest}, but the model's vocab_size is {model.vocab_size}. "
            "Use the tokenizer that the model was trained with, or a fresh model of at least that size."
        )


def contradictions(one: Any, policy: Any) -> str:
    """Return the ids that mean other tokens to `one` than to the policy's tokenizer, in words; "" if there are none. A
    token that only one of them has, such as an added pad, is no contradiction."""
    tokens = {number: token for token, number in one.get_vocab().items()}
    ids = sorted(policy.get_vocab().items(), key=lambda item: item[1])
    differ = [(i, tokens[i], token) for token, i in ids if tokens.get(i, token) != token]
    if not differ:
        return ""
    first, theirs, ours = differ[0]
    return (
        f"{len(differ):,} of {len(ids):,} ids differ, the first is {first}: {theirs!r:.40}, to the policy {ours!r:.40}"
    )


def check_tokens(setting: str, path: str | None, tokenizer: Any) -> None:
    """Raise SettingsError for a model whose tokenizer gives the ids of the policy's `tokenizer` other meanings."""
    if path is not None and (differ := contradictions(load_tokenizer(path), tokenizer)):
        raise SettingsError(
            f"{setting}={path} has another tokenizer than the policy, so the same ids mean other texts ({differ}). "
            "Give a model with the policy's tokenizer"
        )


def tokenizer_special(tokenizer: Any, model: LanguageModel) -> SpecialTokens:
    """Return the special ids to save with `tokenizer`: its own; all of the model's end ids, if they include its own."""
    eos = tokenizer.eos_token_id
    several = model.special.eos if eos in model.special.eos else (eos,)
    return replace(model.special, bos=tokenizer.bos_token_id, eos=several, pad=tokenizer.pad_token_id)
