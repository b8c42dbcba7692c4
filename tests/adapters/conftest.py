from __future__ import annotations

from typing import Any

import pytest
from playing import Table


@pytest.fixture(scope="module")
def table(demo: Any) -> Table:
    return Table(str(demo.tokenizer))
