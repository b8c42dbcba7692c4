"""What others may put in the place of a file: refused with the reason, at once, whatever its size."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from plaudit.support import bounded
from plaudit.support.bounded import UnreadableError, content, lines, opened, record, yaml_text


def test_only_ordinary_files_and_links_to_them_are_opened(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    (tmp_path / "link").symlink_to(file)
    assert content(file) == content(tmp_path / "link") == b"x"
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with socket.socket(socket.AF_UNIX) as one:
        here = Path.cwd()
        os.chdir(tmp_path)  # a socket's path has at most 108 letters
        one.bind("socket")
        os.chdir(here)
    for name, kind in {"fifo": "FIFO", "folder": "folder", "device": "device", "socket": "socket"}.items():
        with pytest.raises(UnreadableError, match=kind):
            opened(tmp_path / name)
    for name in ("circle", "absent"):
        with pytest.raises(OSError, match=name):
            opened(tmp_path / name)


def test_another_users_link_is_followed_only_to_a_file_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_bytes(b"secret")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    try:
        os.chown(tmp_path / "link", 1234, -1, follow_symlinks=False)
    except PermissionError:
        pytest.skip("only root makes files of other users")
    with pytest.raises(UnreadableError, match="another user's link"):
        opened(tmp_path / "link")
    os.chown(tmp_path / "mine", 1234, -1)
    assert content(tmp_path / "link") == b"secret"


def test_sizes_and_lines_have_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    with file.open("wb") as large:
        large.truncate(10 << 30)  # sparse: it takes no room
    with pytest.raises(UnreadableError, match="10,737,418,240 bytes"):
        content(file)
    with pytest.raises(UnreadableError, match="line at byte 0 "):
        list(lines(file))
    file.write_bytes(b'{"a": 1}\n{"b"')
    assert list(lines(file)) == [(0, b'{"a": 1}\n')]
    monkeypatch.setattr(bounded, "LONGEST", 10)
    file.write_bytes(b"123456789\n12345678901\n")
    with pytest.raises(UnreadableError, match="line at byte 10 "):
        list(lines(file))


@pytest.mark.parametrize("line", [b"[]", b"1", b"null", b"{", b"\xff", b'{"a": ' + b"[" * 100_000, b"9" * 10_000])
def test_what_is_no_object_is_no_record(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        record(line)


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(60))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LAUGHS, "an alias"),
        ("a: &a [*a]", "an alias"),
        ("a: !!python/object/apply:os.getcwd []", "tag"),
        ("a: " + "[" * 100_000, "levels"),
        ("? " * 100_000, "levels"),
        ("a: 1\n" * 30_000, "values"),
        ("a: " + "x" * 300_000, "bytes"),
        ("a: {", "no YAML"),
        ("\x00", "no YAML"),
    ],
)
def test_yaml_that_fills_the_memory_is_refused_before_it_is_built(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(text)
    with pytest.raises(UnreadableError, match=reason) as refused:
        yaml_text(tmp_path / "settings.yaml")
    assert len(str(refused.value).splitlines()) == 1


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_bytes(b"a: \xff")
    with pytest.raises(UnreadableError, match="no YAML"):
        yaml_text(tmp_path / "settings.yaml")
