from pathlib import Path

import pytest

from assent.plugins import load_file, load_object


def test_loads_from_files_and_packages(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Box:\n    x: int = 3\n    class Inner: y = 4\n"
    )
    box = load_object(f"{file}:Box")
    assert box().x == 3
    assert load_object(f"{file}:Box") is box  # the file ran once
    assert load_object(f"{file}:Box.Inner.y") == 4
    assert load_object("math:sqrt")(9) == 3


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        ("mine.py", ValueError, "file.py:name"),
        (":name", ValueError, "file.py:name"),
        ("absent.py:name", FileNotFoundError, "no file"),
        ("math:sqr", AttributeError, "nearest name is 'sqrt'"),
        ("no_such_package.part:name", ModuleNotFoundError, "file.py:name"),
    ],
)
def test_errors_say_what_is_wrong(reference: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_object(reference)


def test_a_file_that_is_not_python_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken_reward.py"
    broken.write_text("import math\ndef reward(prompt, completion)\n    return 1.0\n")
    told = rf"Python cannot read {broken}, line 2: expected ':'\. Mend that line\."
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "importing.py").write_text("from broken_reward import reward\n")
    for reference in (f"{broken}:reward", "broken_reward:reward", f"{tmp_path / 'importing.py'}:reward"):
        with pytest.raises(ImportError, match=f"^'{reference}': {told}"):
            load_object(reference)
    with pytest.raises(ImportError, match=f"^'{broken}': {told}"):
        load_file(str(broken))
    broken.write_text("def reward(prompt, completion):\n    return 1.0\n")  # and mended it is read
    assert load_object(f"{broken}:reward")("", "") == 1.0


def test_errors_inside_a_module_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        load_object("broken_module:anything")
    (tmp_path / "late.py").write_text("1 / 0\n")
    for _ in range(2):  # a file that failed is not remembered as loaded
        with pytest.raises(ZeroDivisionError):
            load_object(f"{tmp_path / 'late.py'}:anything")
