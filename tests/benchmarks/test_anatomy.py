"""Operators are sorted into kinds of work, and nothing of the time is lost."""

from __future__ import annotations

import pytest
from anatomy import OTHER, Tracer, grouped, kind_of, table_of, text_of


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
    import torch

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


def test_the_table_for_the_docs() -> None:
    found = {"seconds": 4.0, "kinds": {"matrix products": 3.0, OTHER: 1.0}}
    header, rule, row, _ = table_of({"sft 4M fp32": found}).split("\n")
    assert row.startswith("| sft 4M fp32 | 75% | 0% |")
    assert row.endswith("| 25% |")
    assert header.count("|") == rule.count("|") == row.count("|")
