"""A device that is not there is named before torch fails on it."""

from __future__ import annotations

import pytest
import torch

from plaudit.models.device import device_of


@pytest.mark.parametrize(
    ("gpus", "name", "device"),
    [(0, "auto", "cpu"), (0, "cpu", "cpu"), (2, "auto", "cuda"), (2, "cuda", "cuda"), (2, "cuda:1", "cuda:1")],
)
def test_a_device_that_is_there(gpus: int, name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert device_of(name) == device


@pytest.mark.parametrize(
    ("gpus", "name", "told"),
    [(0, "cuda", "sees 0 GPUs"), (2, "cuda:2", "sees 2 GPUs"), (2, "cudas", "not one of"), (2, "cuda:x", "not one of")],
)
def test_a_device_that_is_not_there(gpus: int, name: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=f"device={name}.*{told}"):
        device_of(name)
