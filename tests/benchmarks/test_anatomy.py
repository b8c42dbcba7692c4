"""Operators are sorted into kinds of work, and nothing of the time is lost."""

from __future__ import annotations

import pytest
import torch
from anatomy import AGAIN, DRAWING, OTHER, Tracer, grouped, kind_of, part_of, table_of, text_of
from torch.profiler import record_function


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten::addmm", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::native_layer_norm", "norms"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::gelu_backward", "activations and other arithmetic"),
        ("aten::cumsum", "sampling"),
        ("aten::_log_softmax", "softmax and log-probs"),
        ("aten::copy_", "copies and indexing"),
        ("some_module", OTHER),
    ],
)
def test_kinds(operator: str, kind: str) -> None:
    assert kind_of(operator) == kind


def test_what_no_operator_took_is_python() -> None:
    found = grouped({"aten::mm": 3.0, "aten::addmm": 1.0, "aten::gelu": 2.0, "mystery": 0.5}, 10.0)
    assert found["matrix products"] == 4.0
    assert found[OTHER] == 0.5 + 3.5
    assert sum(found.values()) == 10.0
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_a_tracer_takes_the_segment_after_the_warm_up() -> None:
    tracer = Tracer(2)
    for step in range(1, 7):
        torch.ones(8, 8) @ torch.ones(8, 8)
        tracer.end(step)
        tracer.begin(step)
    assert tracer.result is not None
    calls = {name: count for name, _, count in tracer.result["operators"]}
    assert calls["aten::mm"] == 2
    assert "matrix products" in text_of("sft 4M fp32", tracer.result)
    idle = Tracer(0)
    idle.begin(1)
    assert idle.result is None


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (["aten::cumsum", DRAWING], "drawing tokens"),
        (["aten::mm", "autograd::engine::evaluate_function: _ChosenLogprobsBackward"], "head and log-probs"),
        (["plaudit::attend_back", "_AttendBackward"], "attention"),
        (["plaudit::step"], "decoding, layers"),
        (["aten::mm", "aten::linear"], "rest of the model"),
        (["some_module"], OTHER),
    ],
)
def test_parts(names: list[str], part: str) -> None:
    assert part_of(names) == part


def test_the_head_again_counts_only_as_a_share_of_its_kernel() -> None:
    """Two kernels of one product each, and once more what belongs to the head of the second."""
    x = torch.ones(300, 300)
    tracer = Tracer(1)
    tracer.begin(1)
    with record_function("plaudit::step"):
        x @ x
    with record_function(AGAIN), record_function("plaudit::step"):
        x @ x
    tracer.end(2)
    found = tracer.result
    assert found is not None
    assert [count for name, _, count in found["operators"] if name == "plaudit::step"] == [1]
    assert found["parts"]["decoding, head"] > 0
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
    assert sum(found["kinds"].values()) == pytest.approx(found["seconds"])


def test_the_table_for_the_docs() -> None:
    found = {"seconds": 4.0, "kinds": {"matrix products": 3.0, OTHER: 1.0}}
    header, rule, row, _ = table_of({"sft 4M fp32": found}).split("\n")
    assert row.startswith("| sft 4M fp32 | 75% | 0% |")
    assert row.endswith("| 25% |")
    assert header.count("|") == rule.count("|") == row.count("|")
