"""The tiny models as fixtures, native and in transformers with the same weights."""

from pathlib import Path
from typing import Any

import pytest
from tiny_models import Letters, transformers_model

from plaudit.models.decoder import Decoder
from plaudit.models.load import load_model


@pytest.fixture
def letters() -> Letters:
    return Letters()


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """kind -> (native decoder, transformers' model), made once."""
    made: dict[str, tuple[Decoder, Any]] = {}

    def pair(kind: str) -> tuple[Decoder, Any]:
        if kind not in made:
            folder: Path = tmp_path_factory.mktemp(kind)
            reference = transformers_model(kind)
            reference.save_pretrained(folder)
            native = load_model(str(folder))
            assert isinstance(native, Decoder)
            made[kind] = native, reference
        return made[kind]

    return pair
