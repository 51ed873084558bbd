"""Colours that can be told apart, also by the colour-blind, and text that can be read on them."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest
from memprof.reports.html.page import _FILLS
from memprof.reports.palette import DARK, LIGHT, PATTERNS, PHASES, ink_on

# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
VISION = {
    "normal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def linear(colour: str) -> list[float]:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def lab(colour: str, vision: str) -> tuple[float, float, float]:
    rgb = [min(max(sum(m * c for m, c in zip(row, linear(colour), strict=True)), 0), 1) for row in VISION[vision]]
    x = (0.4124564 * rgb[0] + 0.3575761 * rgb[1] + 0.1804375 * rgb[2]) / 0.95047
    y = 0.2126729 * rgb[0] + 0.7151522 * rgb[1] + 0.0721750 * rgb[2]
    z = (0.0193339 * rgb[0] + 0.1191920 * rgb[1] + 0.9503041 * rgb[2]) / 1.08883
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_any_two_categories_can_be_told_apart(palette: dict[str, str], vision: str) -> None:
    for one, other in combinations(palette, 2):
        assert math.dist(lab(palette[one], vision), lab(palette[other], vision)) >= 11, (one, other)


@pytest.mark.parametrize("colour", sorted({*LIGHT.values(), *DARK.values(), *PHASES.values()}))
def test_text_on_a_colour_can_be_read(colour: str) -> None:
    def luminance(c: str) -> float:
        return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear(c), strict=True))

    bright, dim = sorted((luminance(colour), luminance(ink_on(colour))), reverse=True)
    assert (bright + 0.05) / (dim + 0.05) >= 4.5


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_weights_reference_and_gradients_differ_in_greys(palette: dict[str, str]) -> None:
    """They are near each other in a bar and on a page printed in black and white."""
    greys = sorted(lab(palette[name], "normal")[0] for name in ("weights", "reference_model", "gradients"))
    assert greys[1] - greys[0] >= 8
    assert greys[2] - greys[1] >= 8


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_no_phase_has_the_colour_of_a_category(palette: dict[str, str]) -> None:
    for phase, category in product(PHASES, palette):
        assert math.dist(lab(PHASES[phase], "normal"), lab(palette[category], "normal")) >= 11, (phase, category)


def test_every_pattern_of_a_chart_is_one_of_bars_and_legend() -> None:
    assert set(PATTERNS.values()) - {""} <= set(_FILLS)
