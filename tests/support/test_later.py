"""Importing a library only when it is used."""

from __future__ import annotations

import subprocess
import sys

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


def test_a_postponed_library_is_absent_until_it_is_used_and_then_the_real_one(environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
