"""The table as a picture: for every line ours over the peer's, and how much of the floor each side reaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from floor import floors_of, ratio

OURS, THEIRS = "#1f5f8b", "#c9a66b"


def draw(result: dict[str, Any], path: Path) -> Path:
    """Write the chart as PNG; lines without a peer's figure are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = list(reversed(list(comparisons(result))))
    figure, (left, right) = pyplot.subplots(
        1, 2, sharey=True, figsize=(11, 1.4 + 0.26 * len(bars)), layout="constrained", gridspec_kw={"wspace": 0.02}
    )
    places = range(len(bars))
    left.barh(places, [bar["ratio"] for bar in bars], color=OURS, height=0.7)
    for place, bar in enumerate(bars):
        left.text(bar["ratio"] + 0.03, place, f"{bar['ratio']:.2f}", va="center", fontsize=7)
    left.axvline(1, color="black", linewidth=0.8)
    left.set_yticks(places, [bar["label"] for bar in bars], fontsize=7.5)
    left.set_xlim(0, 1.12 * max([bar["ratio"] for bar in bars], default=1.0))
    left.set_title("times as fast as the peer", fontsize=10, loc="left")
    for offset, side, colour in ((0.19, "ours", OURS), (-0.19, "theirs", THEIRS)):
        shares = [100 * (bar[side] or 0.0) for bar in bars]
        right.barh([place + offset for place in places], shares, color=colour, height=0.36, label=side)
    right.set_title("share of the floor, %", fontsize=10, loc="left")
    right.legend(["Plaudit", "peer"], fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    for axes in (left, right):
        axes.tick_params(axis="x", labelsize=8)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(-0.6, len(bars) - 0.4)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def comparisons(result: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for record in result["records"]:
        for theirs in record["peers"].values():
            times = ratio(record, theirs)
            if times is None or record["unit"] != "tok/s":
                continue
            shares = [found and found[1] for found in floors_of(record, result["peaks"], record["ours"], theirs)]
            label = f"{record['title']} · {record['model']} {record['precision']} · {theirs['name'].split(',')[0]}"
            found.append({"label": label, "ratio": times, "ours": shares[0], "theirs": shares[1]})
    return found
