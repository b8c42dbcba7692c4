"""The colours of runs: in both schemes they stand out from the page and from each other, for the colour-blind too."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest

from plaudit.page.run_page import WEB

BACK = {"light": "#ffffff", "dark": "#12161b"}
SEEN = {
    "all colours": np.eye(3),
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""What is left of linear red, green and blue (Machado, Oliveira and Fernandes 2009)."""
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(parts: np.ndarray) -> np.ndarray:
    x, y, z = np.cbrt(np.maximum(XYZ @ np.clip(parts, 0, 1) / [0.9505, 1, 1.089], 1e-6))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def palettes() -> dict[str, list[str]]:
    lines = re.findall(r"^ +--c0.*$", (WEB / "page.css").read_text(), re.M)
    return dict(zip(BACK, (re.findall("#[0-9a-f]{6}", line) for line in lines), strict=True))


@pytest.mark.parametrize("scheme", list(BACK))
def test_eight_colours_stand_out_and_differ_however_they_are_seen(scheme: str) -> None:
    palette = palettes()[scheme]
    assert len(set(palette)) == 8
    back = XYZ[1] @ linear(BACK[scheme])
    for colour in palette:
        dark, light = sorted((back, XYZ[1] @ linear(colour)))
        assert (light + 0.05) / (dark + 0.05) >= 3, colour  # what WCAG asks of lines
    for name, matrix in SEEN.items():
        for one, other in combinations(palette, 2):
            apart = np.linalg.norm(lab(matrix @ linear(one)) - lab(matrix @ linear(other)))
            assert apart >= 20, (name, one, other, apart)
