"""Importing a library only when it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from plaudit.support.later import postponed
with postponed("torch"):
    import plaudit.algorithms
    from plaudit.maths.losses import bradley_terry, logsigmoid
    from plaudit.maths.kl import Tensor
assert not [name for name in sys.modules if name.partition(".")[0] == "torch"]
assert plaudit.algorithms.PPO().data == "prompts"

import torch
assert torch.__version__ and isinstance(torch.zeros(1), Tensor) and not isinstance(1, Tensor)
assert torch.equal(logsigmoid(torch.ones(2)), torch.nn.functional.logsigmoid(torch.ones(2)))
with postponed("torch"):
    import torch as again
assert again is torch, "what is loaded already is not put off"
"""


DERIVED = """
import sys
from plaudit.support.later import postponed
with postponed("torch"):
    from torch import nn, float32
    assert "torch._C" not in sys.modules
    class Mine(nn.Module):
        pass
    import torch
    assert torch.__version__ and issubclass(Mine, torch.nn.Module)
assert isinstance(Mine(), torch.nn.Module) and "torch._C" in sys.modules
"""


@pytest.mark.slow
def test_a_class_of_the_library_loads_it(environment: dict[str, str]) -> None:
    """As a plugin may derive one while a recipe is checked."""
    done = subprocess.run([sys.executable, "-c", DERIVED], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_postponed_library_is_absent_until_it_is_used_and_then_the_real_one(environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
