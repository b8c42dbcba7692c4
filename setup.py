"""What a package index shows beside pyproject.toml: the README, its links absolute, and addresses of the project.

    PLAUDIT_ADDRESS=https://HOST/OWNER/plaudit python -m build

Without an address, links to files of the checkout are left as plain words: an index shows no such files.
"""

import os
import re
from pathlib import Path

from setuptools import setup


def absolute(text: str, address: str) -> str:
    """Turn links to files of the checkout into links below `address`, or into their words if there is none."""

    def link(found: re.Match[str]) -> str:
        words, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        return f"[{words}]({address}/blob/main/{target})" if address else words

    return re.sub(r"\[([^]]+)\]\(([^)\s]+)\)", link, text)


if __name__ == "__main__":
    address = os.environ.get("PLAUDIT_ADDRESS", "").rstrip("/")
    pages = {"Source": "", "Documentation": "/tree/main/docs", "Changes": "/blob/main/CHANGELOG.md"}
    setup(
        long_description=absolute((Path(__file__).parent / "README.md").read_text(encoding="utf-8"), address),
        long_description_content_type="text/markdown",
        project_urls={name: f"{address}{path}" for name, path in pages.items()} if address else {},
    )
