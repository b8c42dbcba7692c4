"""Rewards as TRL and verl call them, which the Python of docs/switching.md imports under this name."""

from __future__ import annotations

from typing import Any


def format_reward(
    prompts: list[str],
    completions: list[str],
    answer: list[str] | None = None,
    level: list[int] | None = None,
    **more: Any,
) -> list[float]:
    """As of TRL: an entry a completion in each column, and a number for each. That of the longest answer is highest."""
    count = len(completions)
    columns = zip(prompts, completions, answer or [""] * count, level or [1] * count, strict=True)
    return [float(times * len(text) * (right in text)) for _, text, right, times in columns]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """As of verl: its parquet's columns of one answer."""
    return {"score": float(solution_str.endswith(ground_truth)), "pred": solution_str}
