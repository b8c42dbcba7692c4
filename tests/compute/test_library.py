"""The kernels are compiled once, found again, and done without where there is no compiler."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from plaudit.compute.calls import available, usable
from plaudit.compute.declarations import symbols
from plaudit.compute.library import FEWER, FLAGS, SOURCE, library, number

pytestmark = pytest.mark.slow

REAL = shutil.which("c++") or shutil.which("g++") or ""
ANSWER = 4321
SMALL = "".join(f'extern "C" long long {name}() {{ return 1; }}\n' for name in [*symbols(), "sound_here"])
SMALL += f'extern "C" long long page_positions() {{ return {ANSWER}; }}\n'
"""What stands for the kernels: their names, and nothing to optimize. It compiles in a moment, they in seconds."""
LOADS = "import os; from pathlib import Path; from plaudit.compute import library; library.SOURCE = Path('{}')"


def played_compiler(folder: Path, name: str, script: str) -> Path:
    made = folder / name
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_text(f"#!/bin/sh\n{script}\n")
    made.chmod(0o755)
    return made


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source that is compiled in place of the kernels."""
    if not REAL:
        pytest.skip("there is no C++ compiler: install g++")
    source = tmp_path / "source" / "kernels.cpp"
    source.parent.mkdir()
    source.write_text(SMALL)
    monkeypatch.setattr("plaudit.compute.library.SOURCE", source)
    return source


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of compiled kernels, which is not there yet."""
    monkeypatch.setenv("PLAUDIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


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
def test_the_kernels_are_compiled_and_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real ones; the other tests compile less."""
    monkeypatch.setattr("plaudit.compute.library.FLAGS", (*FLAGS, "-O0"))  # in a third of the time
    found = library.__wrapped__()
    assert found is not None
    assert (found.page_positions(), found.sound_here()) == (number("page_positions"), 1)
    (made,) = fresh.glob("*.so")
    before = made.stat().st_mtime_ns
    assert library.__wrapped__() is not None
    assert made.stat().st_mtime_ns == before


def test_of_processes_that_meet_one_compiles_and_later_ones_never(small: Path, tmp_path: Path) -> None:
    """The compiler takes its time, so that the later process finds it at work."""
    here, cache = tmp_path / "here", tmp_path / "cache"
    here.mkdir()
    ask = f"{LOADS.format(small)}; Path({str(here)!r}, str(os.getpid())).touch(); assert library.library()"
    slow = f"echo >> {tmp_path}/times; until [ $(ls {here} | wc -l) = 2 ]; do sleep 0.1; done; sleep 0.5"
    counting = played_compiler(tmp_path / "bin", "c++", f'[ "$1" = --version ] || {{ {slow}; }}\nexec {REAL} "$@"')
    environment = os.environ | {"PLAUDIT_CACHE": str(cache), "PATH": f"{counting.parent}:{os.environ['PATH']}"}
    together = [subprocess.Popen([sys.executable, "-c", ask], env=environment) for _ in range(2)]
    assert [process.wait(120) for process in together] == [0, 0]
    assert (tmp_path / "times").read_text() == "\n"
    made, beside = sorted(file for file in (cache / "kernels").iterdir() if file.suffix != ".lock")  # and no leftovers
    assert (made.suffix, beside.suffix) == (".so", ".sum")
    before = made.stat().st_mtime_ns
    assert subprocess.run([sys.executable, "-c", ask], env=environment, check=False, timeout=120).returncode == 0
    assert made.stat().st_mtime_ns == before


def kept_elsewhere(kept: Path, content: bytes) -> None:
    """As another process would write it: what is loaded stays as it is."""
    kept.unlink()
    kept.write_bytes(content)
    kept.chmod(0o700)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "damage", ["cut at 4 KB", "one bit", "no digest beside it", "another's digest", "others may write"]
)
def test_what_is_not_as_it_was_written_is_compiled_again(
    damage: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where it would load and only then kill the process."""
    assert library.__wrapped__() is not None
    (kept,) = fresh.glob("*.so")
    beside, whole, before = kept.with_suffix(".sum"), kept.read_bytes(), kept.stat().st_mtime_ns
    if damage == "cut at 4 KB":
        kept_elsewhere(kept, whole[:4096])
    elif damage == "one bit":
        kept_elsewhere(kept, whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "no digest beside it":
        beside.unlink()
    elif damage == "another's digest":
        beside.write_text(f"{len(whole)} {'0' * 64}")
    else:
        kept.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert library.__wrapped__() is not None
    assert [record.message.endswith("compiled again") for record in caplog.records] == [True]  # said, once
    assert kept.stat().st_size == len(whole)
    assert kept.stat().st_mtime_ns != before
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert library.__wrapped__() is not None
    assert not caplog.records  # and kept


def test_a_process_starts_with_a_library_that_was_cut_off(small: Path, fresh: Path) -> None:
    """It was killed by SIGBUS."""
    assert library.__wrapped__() is not None
    (kept,) = fresh.glob("*.so")
    kept_elsewhere(kept, kept.read_bytes()[:4096])
    loads = [sys.executable, "-I", "-S", "-c", f"import ctypes; ctypes.CDLL({str(kept)!r})"]
    assert subprocess.run(loads, check=False, timeout=60).returncode != 0
    environment = os.environ | {"PLAUDIT_CACHE": str(fresh.parent)}
    command = [sys.executable, "-c", f"{LOADS.format(small)}; assert library.library()"]
    assert subprocess.run(command, env=environment, check=False, timeout=120).returncode == 0


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("mode", [0o770, 0o707], ids=["its group", "everybody"])
def test_nothing_is_loaded_from_a_folder_that_others_may_write_to(
    mode: int, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert library.__wrapped__() is not None
    assert fresh.stat().st_mode & 0o777 == 0o700
    before = {file: file.stat().st_mtime_ns for file in fresh.iterdir()}
    fresh.chmod(mode)
    found = library.__wrapped__()
    assert found is not None
    assert not found._name.startswith(str(fresh))
    assert [record.message for record in caplog.records if "others may write to it" in record.message]
    assert {file: file.stat().st_mtime_ns for file in fresh.iterdir()} == before


@pytest.mark.usefixtures("small")
@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can make others' files")
@pytest.mark.parametrize("foreign", ["folder", "library"])
def test_nothing_is_loaded_that_is_another_users(foreign: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.__wrapped__() is not None
    (kept,) = fresh.glob("*.so")
    os.chown(fresh if foreign == "folder" else kept, 65534, -1)
    found = library.__wrapped__()
    assert found is not None
    assert found._name != str(kept)


@pytest.mark.usefixtures("small")
def test_files_are_kept_private_whatever_others_may_do_by_default(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        assert library.__wrapped__() is not None
    finally:
        os.umask(before)
    (kept,) = fresh.glob("*.so")
    found = library.__wrapped__()
    assert found is not None
    assert found._name == str(kept)


@pytest.mark.usefixtures("small")
def test_the_compiler_that_is_named_comes_first_and_the_next_where_it_fails(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = played_compiler(tmp_path, "named", f'echo "$@" >> {tmp_path}/asked; exec {REAL} "$@"')
    monkeypatch.setenv("CXX", f"{named} -DOF_THE_USER")
    assert library.__wrapped__() is not None
    assert "-DOF_THE_USER -O3" in (tmp_path / "asked").read_text()
    played_compiler(tmp_path, "named", f'[ "$2" = --version ] && echo 2 && exit; echo > {tmp_path}/failed; exit 1')
    assert library.__wrapped__() is not None
    assert (tmp_path / "failed").exists()


@pytest.mark.skipif(platform.machine().lower() not in FEWER, reason="fewer instructions are known of x86 and ARM")
@pytest.mark.parametrize("native", ["-march=of-no-processor", "-DILLEGAL"], ids=["not compiled", "SIGILL"])
def test_fewer_instructions_are_tried_where_the_processors_own_fail(
    native: str, small: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = "sound_here() {"
    assert own in SMALL
    small.write_text(SMALL.replace(own, f"{own}\n#ifdef ILLEGAL\n__builtin_trap();\n#endif\n"))
    monkeypatch.setattr("plaudit.compute.library.NATIVE", (native,))
    with caplog.at_level(logging.INFO):
        assert library.__wrapped__() is not None
        assert "fewer instructions" in caplog.text
        assert ("SIGILL" in caplog.text) == (native == "-DILLEGAL")
        caplog.clear()
        assert library.__wrapped__() is not None
        assert not caplog.records  # what runs was kept


def test_a_library_that_lacks_a_kernel_is_not_used(small: Path, fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    small.write_text(SMALL.replace("rotate_bf16", "rotated"))
    assert library.__wrapped__() is None
    assert "rotate_bf16" in caplog.text
    assert list(fresh.glob("*.so")) == []


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
        (ANSWERS + 'echo "no such processor" >&2', "c++: no such processor"),
        (ANSWERS + "printf 'Schl\\374ssel fehlt' >&2", r"c++: Schl\xfcssel fehlt"),  # latin-1
        ('echo "no licence" >&2', "c++: no licence"),
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
    for name in ("c++", "g++"):
        broken = played_compiler(tmp_path / "bin", name, f"{answers}\nexit 1")
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.environ['PATH']}")
    assert library.__wrapped__() is None
    assert expected in caplog.text
    assert not fresh.exists() or list(fresh.glob("*.so")) == []


@pytest.mark.parametrize("named", [".", "~"])
@pytest.mark.usefixtures("small")
def test_the_folder_is_the_one_that_is_meant(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no shell has read its name, and where it is this one, whose name libraries do not go by."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLAUDIT_CACHE", named)
    assert library.__wrapped__() is not None
    (made,) = tmp_path.glob("kernels/*.so")
    found = library.__wrapped__()
    assert found is not None
    assert found._name == str(made)


@pytest.mark.usefixtures("small")
def test_where_nothing_can_be_written_a_process_compiles_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("PLAUDIT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    found = library.__wrapped__()
    assert found is not None
    assert found.page_positions() == ANSWER
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("said", ["No space left on device", ""], ids=["full", "nothing may be run"])
def test_where_nothing_can_be_kept_a_process_compiles_its_own(
    said: str, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler plays the folder's disk: it fails there, or leaves what cannot be loaded."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    fails = f"echo '{said}' >&2; exit 1" if said else f"> {fresh}/*/native.so; exit 0"
    played_compiler(tmp_path, "c++", f'case "$*" in *{fresh}*) {fails} ;; esac\nexec {REAL} "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    found = library.__wrapped__()
    assert found is not None
    assert found.page_positions() == ANSWER
    assert [*fresh.glob("*.so"), *elsewhere.iterdir()] == []


@pytest.mark.usefixtures("small")
def test_a_folder_that_may_not_be_looked_into_is_done_without(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another user's, which root would look into."""

    def forbidden(path: Path, **more: object) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", forbidden)
        patched.setattr("plaudit.compute.library._private", lambda found: forbidden(fresh))
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
    """Down to the instructions that they are for, which are there without optimizing too."""
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-O3")]
    made = tmp_path / "kernels.s"
    command = [REAL, *flags, f"-march={processor}", "-S", "-o", str(made), str(SOURCE)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "-march=" in said.stderr and processor in said.stderr:
        pytest.skip(f"this compiler does not know {processor}")
    assert said.returncode == 0, said.stderr
    found = made.read_text()
    assert all(instruction in found for instruction in instructions)


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="needs Debian's g++-aarch64-linux-gnu")
def test_arm_multiplies_by_whole_registers(tmp_path: Path) -> None:
    main = f'#include "{SOURCE}"\nint main() {{ return sound_here() ? 7 : 0; }}\n'
    (tmp_path / "main.cpp").write_text(main)
    flags = [flag for flag in FLAGS if flag != "-shared"]
    for more in (["-S"], ["-static"]):
        command = ["aarch64-linux-gnu-g++", *flags, *more, "-o", str(tmp_path / more[0]), str(tmp_path / "main.cpp")]
        subprocess.run(command, check=True, capture_output=True, timeout=240)
    found = (tmp_path / "-S").read_text()
    assert found.count("fmla\tv") > 1000
    assert "fmaf" not in found
    if emulator := shutil.which("qemu-aarch64-static"):
        assert subprocess.run([emulator, str(tmp_path / "-static")], check=False, timeout=240).returncode == 7
