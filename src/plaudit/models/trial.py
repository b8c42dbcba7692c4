"""Try the tokenizer of a folder in a process of its own: a stranger's may crash, fill memory or never end in Rust,
where Python cannot interrupt it. `tokenizer.py` runs this script with `python -I`, and shows its last line on stderr.

    folder, seconds of CPU time, bytes of memory -> tokenizer.json tokenises and restores a text; chat templates compile
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

TEXT = "Hello world, I saw it!\n\n  def f(x):\treturn 12.5 + 345678\n" + "a" * 64 + " äöü é 你好 🙂 </s> <|end|>"
MOST_TOKENS = 100
"""Most tokens per byte of text that a sane tokenizer makes."""


def main(folder: Path, seconds: int, memory: int) -> None:
    with suppress(ImportError, ValueError, OSError):  # systems other than Linux may lack these limits
        import resource

        for limit, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory)):
            there = resource.getrlimit(limit)[1]
            most = most if there == resource.RLIM_INFINITY else min(most, there)
            resource.setrlimit(limit, (most, most))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if (path := folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_padding()
        ids: list[int] = []
        with suppress(Exception):  # it may refuse characters of TEXT that its own rows do not have
            ids = tokenizer.encode(TEXT).ids
            tokenizer.decode(ids)
        if len(ids) > MOST_TOKENS * len(TEXT.encode()):
            raise ValueError(f"it makes {len(ids):,} tokens of a text of {len(TEXT)} characters")
    for template in templates(folder):
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        known = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)  # transformers' own tag
        with suppress(TemplateError, RecursionError):  # rows that it cannot render are reported later
            ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).from_string(known)


def templates(folder: Path) -> list[str]:
    files = [folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    found = [path.read_text(encoding="utf-8") for path in files if path.is_file()]
    if (path := folder / "tokenizer_config.json").is_file():
        template = json.loads(path.read_text(encoding="utf-8")).get("chat_template") or []
        several = [template] if isinstance(template, str) else [one.get("template", "") for one in template]
        found += [text for text in several if isinstance(text, str)]
    return found


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    except BaseException as error:  # noqa: BLE001 - a panic of Rust is no Exception
        message = str(error).strip() or type(error).__name__
        os.write(2, message.splitlines()[-1].encode(errors="replace"))
        os._exit(1)
