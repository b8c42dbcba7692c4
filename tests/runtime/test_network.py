"""By which address and interface others reach this machine."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from plaudit.runtime import network
from plaudit.runtime.network import interface_of, let_gloo_be_reached, let_nccl_raise, own_address

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which interface has an address")


@linux
def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of(own_address()) in [name for _, name in socket.if_nameindex()]
    assert interface_of("203.0.113.7") is None, "nobody's: it is for documentation"


@linux
def test_gloo_listens_where_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    let_gloo_be_reached()
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface_of(own_address())


def test_the_users_choice_of_an_interface_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    let_gloo_be_reached()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_gloo_chooses_where_no_interface_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(network, "interface_of", lambda address: None)
    let_gloo_be_reached()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_nccl_raises_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    let_nccl_raise()
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")
    let_nccl_raise()
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
