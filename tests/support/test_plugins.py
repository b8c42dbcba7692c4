import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import plaudit
from plaudit.support.plugins import (
    PluginError,
    known_here_alone,
    load_file,
    load_object,
    load_plugins,
    registered_again,
)
from plaudit.types import Prompt


def test_loads_from_files_and_packages(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Box:\n    x: int = 3\n    class Inner: y = 4\n"
    )
    box = load_object(f"{file}:Box")
    assert box().x == 3
    assert box.__annotations__ == {
        "x": int
    }  # and not "int": what the file does not import from the future is not there
    assert load_object(f"{file}:Box") is box  # the file ran once
    assert load_object(f"{file}:Box.Inner.y") == 4
    assert load_object("math:sqrt")(9) == 3


def test_a_file_that_was_edited_is_run_again(tmp_path: Path) -> None:
    """In a notebook the older form would have trained on, without a word."""
    file = tmp_path / "edited.py"
    for value in (1, 2):  # within a second, and of one length
        file.write_text(f"from dataclasses import dataclass\n@dataclass\nclass Box:\n    x: int = {value}\n")
        box = load_object(f"{file}:Box")
        assert box().x == value
        assert load_object(f"{file}:Box") is box
    file.write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_object(f"{file}:Box")


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        ("mine.py", ValueError, "file.py:name"),
        (":name", ValueError, "file.py:name"),
        ("absent.py:name", FileNotFoundError, "no file"),
        ("math:sqr", AttributeError, "mean sqrt"),
        ("math:Sqrt.x.y", AttributeError, "'Sqrt'; .* sqrt"),
        ("math:pi.zzzzz", AttributeError, "'zzzzz'; .* as_integer_ratio, conjugate"),
        ("no_such_package:name", ModuleNotFoundError, "no module 'no_such_package'.*file.py:name"),
        ("no_such_package.part:name", ModuleNotFoundError, "file.py:name"),
    ],
)
def test_errors_say_what_is_wrong(reference: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_object(reference)


def loaded_from(folder: Path, *references: str) -> list[str]:
    """What loading each says in a process that has the folder in its path, as a user's own has."""
    asking = "import sys; from plaudit.support.plugins import load_object\nfor reference in sys.argv[1:]:\n"
    asking += (
        "    try: print(load_object(reference))\n    except Exception as error: print(type(error).__name__, error)"
    )
    source = str(Path(plaudit.__file__).parents[1])
    command = [sys.executable, "-c", asking, *references]
    done = subprocess.run(command, env={"PYTHONPATH": f"{folder}:{source}"}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_file_that_is_not_python_is_named_with_its_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken_reward.py"
    broken.write_text("import math\ndef reward(prompt, completion)\n    return 1.0\n")
    told = rf".*{broken}, line 2: expected ':'"
    (tmp_path / "importing.py").write_text("from broken_reward import reward\n")
    references = [f"{broken}:reward", "broken_reward:reward", f"{tmp_path / 'importing.py'}:reward"]
    for reference, said in zip(references, loaded_from(tmp_path, *references), strict=True):
        assert re.match(f"ImportError '{reference}': {told}", said)
    with pytest.raises(ImportError, match=f"^'{broken}': {told}"):
        load_file(str(broken))
    broken.write_text("def reward(prompt, completion):\n    return 1.0\n")  # and mended it is read
    assert load_object(f"{broken}:reward")("", "") == 1.0


def test_errors_inside_a_module_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "broken_module.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "asking.py").write_text("raise ModuleNotFoundError('get it at my.site')\n")
    assert loaded_from(tmp_path, "broken_module:anything", "asking:anything") == [
        "ModuleNotFoundError No module named 'a_package_that_is_not_there'",
        "ModuleNotFoundError get it at my.site",
    ]
    (tmp_path / "late.py").write_text("1 / 0\n")
    for _ in range(2):  # a file that failed is not remembered as loaded
        with pytest.raises(ZeroDivisionError):
            load_object(f"{tmp_path / 'late.py'}:anything")


def test_a_plugin_that_is_refused_is_named_with_its_line(tmp_path: Path) -> None:
    """Its own, not that of the library which found the fault."""
    files = [tmp_path / "well.py", tmp_path / "refused.py"]
    files[0].write_text("loaded = 3\n")
    files[1].write_text("import json\n\ndef register():\n    json.loads('{')\n\nregister()\n")
    with pytest.raises(PluginError, match=rf"^'{files[1]}', line 4: Expecting"):
        load_plugins([str(file) for file in files])
    assert load_object(f"{files[0]}:loaded") == 3
    with pytest.raises(PluginError, match=r"^'absent\.py': .*/absent\.py\."):
        load_plugins(["absent.py"])


def test_what_is_registered_again_is_of_one_place() -> None:
    """Of two objects without a place of their own, neither is the other's newer form."""

    def cell() -> list[Callable[[], object]]:
        def reward() -> None: ...

        return [reward, lambda: None]

    (reward, nameless), (newer, nameless_too) = cell(), cell()
    assert registered_again(newer, reward)
    assert registered_again(partial(newer), partial(partial(reward)))
    assert not registered_again(nameless, reward)
    assert registered_again(nameless_too, nameless)
    one, other = SimpleNamespace(), SimpleNamespace()
    assert registered_again(one, one)
    assert not registered_again(one, other)


def test_a_class_of_another_name_takes_the_place_of_one_that_an_edited_file_has_no_more(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class First: ...\nclass Other: ...\ndef made():\n    class Within: ...\n    return Within\n")
    before = load_file(str(file))
    first, within = before.First, before.made()
    assert not registered_again(before.Other, first)  # both are there
    assert not registered_again(before.Other, within)
    file.write_text("class Other: ...\n")
    other = load_file(str(file)).Other
    assert registered_again(other, first)
    assert not registered_again(other, within)  # nobody can say whether that is gone
    assert not registered_again(first, other)


def test_what_another_process_knows_of_what_was_registered() -> None:
    """What is ours, and what it finds in the same files; of a script or notebook nothing."""
    ours, theirs, script = Prompt, SimpleNamespace(__module__="plaudits.reward"), SimpleNamespace(__module__="__main__")
    assert [known_here_alone(thing, []) for thing in (ours, theirs, script)] == [False, True, True]
    assert [known_here_alone(thing, ["mine.py"]) for thing in (ours, theirs, script)] == [False, False, True]
