"""The kernels are compiled once, found again, and done without where there is no compiler."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from plaudit.kernels.library import FLAGS, SOURCE, available, library, number, usable

ASK = "from plaudit.kernels.library import library; import sys; sys.exit(library() is None)"


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for compiled kernels."""
    monkeypatch.setenv("PLAUDIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.usefixtures("kernels")
def test_this_machine_has_kernels() -> None:
    assert library() is not None
    assert available(torch.float32)
    assert available(torch.bfloat16)
    assert not available(torch.float64)
    assert number("page_positions") == 2 * number("register_numbers")


@pytest.mark.usefixtures("kernels")
def test_what_the_kernels_take() -> None:
    x = torch.zeros(4, 6)
    assert usable(x, x[:2], torch.nn.Parameter(x))
    assert usable(x[:, :3])  # rows may lie apart
    assert not usable(x.T)  # numbers of a row may not
    assert not usable(x.double())
    assert not usable(x, x.bfloat16())
    assert not usable(x.to("meta"))


@pytest.mark.usefixtures("kernels")
def test_of_processes_that_meet_one_compiles_and_later_ones_never(tmp_path: Path) -> None:
    counting, cache = tmp_path / "bin" / "c++", tmp_path / "cache"
    counting.parent.mkdir()
    real = shutil.which("c++") or shutil.which("g++")
    counting.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo >> {tmp_path}/times\nexec {real} "$@" -O0\n')
    counting.chmod(0o755)
    environment = os.environ | {"PLAUDIT_CACHE": str(cache), "PATH": f"{counting.parent}:{os.environ['PATH']}"}
    together = [subprocess.Popen([sys.executable, "-c", ASK], env=environment) for _ in range(2)]
    assert [process.wait(120) for process in together] == [0, 0]
    assert (tmp_path / "times").read_text() == "\n"
    (made,) = (file for file in cache.iterdir() if file.suffix != ".lock")  # and no leftovers
    before = made.stat().st_mtime_ns
    assert subprocess.run([sys.executable, "-c", ASK], env=environment, check=False, timeout=120).returncode == 0
    assert made.stat().st_mtime_ns == before


@pytest.mark.usefixtures("kernels")
def test_what_was_cut_off_is_compiled_again(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plaudit.kernels.library.FLAGS", (*FLAGS, "-O0"))  # soon done
    assert library.__wrapped__() is not None
    (kept,) = fresh.glob("*.so")
    size = kept.stat().st_size
    whole = kept.read_bytes()
    kept.unlink()  # the loaded one stays as it is
    kept.write_bytes(whole[:100])
    assert library.__wrapped__() is not None
    assert kept.stat().st_size == size


def test_without_a_compiler_torch_takes_over(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    with caplog.at_level(logging.INFO):
        assert library.__wrapped__() is None
    assert "no C++ compiler" in caplog.text


ANSWERS = '[ "$1" = --version ] && echo 1.0 && exit 0\n'


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (ANSWERS + 'echo "no such processor" >&2', "their place: no such processor"),
        (ANSWERS + "printf 'Schl\\374ssel fehlt' >&2", r"their place: Schl\xfcssel fehlt"),  # latin-1
        ('echo "no licence" >&2', "their place: no licence"),
    ],
    ids=["plain", "latin-1", "not even its version"],
)
def test_what_the_compiler_said_is_passed_on(
    answers: str,
    expected: str,
    fresh: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = tmp_path / "bin" / "c++"
    broken.parent.mkdir()
    broken.write_text(f"#!/bin/sh\n{answers}\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.environ['PATH']}")
    assert library.__wrapped__() is None
    assert expected in caplog.text
    assert not fresh.exists() or list(fresh.glob("*.so")) == []


@pytest.mark.parametrize("named", [".", "~"])
@pytest.mark.usefixtures("kernels")
def test_the_folder_is_the_one_that_is_meant(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no shell has read its name, and where it is this one, whose name libraries do not go by."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLAUDIT_CACHE", named)
    monkeypatch.setattr("plaudit.kernels.library.FLAGS", (*FLAGS, "-O0"))  # soon done
    assert library.__wrapped__() is not None
    (made,) = tmp_path.glob("*.so")
    found = library.__wrapped__()
    assert found is not None
    assert found._name == str(made)


@pytest.mark.usefixtures("kernels")
def test_where_nothing_can_be_written_a_process_compiles_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("PLAUDIT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    monkeypatch.setattr("plaudit.kernels.library.FLAGS", (*FLAGS, "-O0"))  # soon done
    found = library.__wrapped__()
    assert found is not None
    assert found.page_positions() == number("page_positions")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("said", ["No space left on device", ""], ids=["full", "nothing may be run"])
def test_where_nothing_can_be_kept_a_process_compiles_its_own(
    said: str, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler plays the folder's disk: it fails there, or leaves what cannot be loaded."""
    played, elsewhere = tmp_path / "bin" / "c++", tmp_path / "elsewhere"
    for folder in (played.parent, elsewhere):
        folder.mkdir()
    fails = f"echo '{said}' >&2; exit 1" if said else f"> {fresh}/*/kernels.so; exit 0"
    real = shutil.which("c++") or shutil.which("g++")
    played.write_text(f'#!/bin/sh\ncase "$*" in *{fresh}*) {fails} ;; esac\nexec {real} "$@" -O0\n')
    played.chmod(played.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{played.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    found = library.__wrapped__()
    assert found is not None
    assert found.page_positions() == number("page_positions")
    assert [*fresh.glob("*.so"), *elsewhere.iterdir()] == []


@pytest.mark.usefixtures("kernels")
def test_a_folder_that_may_not_be_looked_into_is_done_without(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another user's, which root would look into."""

    def forbidden(path: Path, **more: object) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "exists", forbidden)
        patched.setattr(Path, "mkdir", forbidden)
        patched.setattr("plaudit.kernels.library.FLAGS", (*FLAGS, "-O0"))  # soon done
        found = library.__wrapped__()
    assert found is not None
    assert not fresh.exists()


def test_they_can_be_turned_off(without_kernels: None) -> None:
    assert library() is None
    assert not available(torch.float32)
    assert not usable(torch.zeros(2))


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the names of processors are x86's")
@pytest.mark.parametrize(
    ("processor", "instructions"),
    [
        pytest.param(
            *("sapphirerapids", ("ldtilecfg", "tdpbf16ps")),
            marks=pytest.mark.skipif(sys.platform != "linux", reason="these registers are asked for as on Linux"),
        ),
        ("cooperlake", ("vdpbf16ps", "zmm")),
        ("skylake-avx512", ("vfmadd", "zmm")),
        ("x86-64", ()),
    ],
)
def test_the_kernels_compile_for_other_processors(
    processor: str, instructions: tuple[str, ...], tmp_path: Path
) -> None:
    """Down to the instructions that they are for."""
    compiler = shutil.which("c++") or shutil.which("g++")
    flags = [flag for flag in FLAGS if flag not in ("-march=native", "-shared")]
    made = tmp_path / "kernels.s"
    command = [str(compiler), *flags, f"-march={processor}", "-S", "-o", str(made), str(SOURCE)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "-march=" in said.stderr and processor in said.stderr:
        pytest.skip(f"this compiler does not know {processor}")
    assert said.returncode == 0, said.stderr
    found = made.read_text()
    assert all(instruction in found for instruction in instructions)
