"""Words and figures: rounding, units, and strings that print nothing harmful."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memprof.reports.document.text import duration, plain, sentence_list, short_path, signed_gib, thousands

from memprof.units import GIB, gib, percent


@pytest.mark.parametrize(
    ("n_bytes", "words"),
    [
        (0, "0.00"), (1, "<0.01"), (-1, ">−0.01"), (-GIB, "−1.00"), (GIB, "1.00"), (3 * GIB // 2, "1.50"),
        (GIB // 100, "0.01"),
    ],
)  # fmt: skip
def test_gib_never_hides_a_byte(n_bytes: int, words: str) -> None:
    assert gib(n_bytes) == words


def test_signs() -> None:
    assert (signed_gib(-2 * GIB), signed_gib(GIB), signed_gib(5)) == ("−2.00", "+1.00", "0.00")


@pytest.mark.parametrize(
    ("part", "whole", "words"),
    [(0, 5, "0%"), (1, 0, "–"), (1, 100_000, "<0.1%"), (1, 200, "0.5%"), (999, 10_000, "10%"), (5, 5, "100%")],
)
def test_percent(part: int, whole: int, words: str) -> None:
    assert percent(part, whole) == words


@pytest.mark.parametrize(
    ("us", "words"),
    [
        (7, "7 µs"),
        (1_500, "1.5 ms"),
        (250_000, "250 ms"),
        (9_600_000, "9.6 s"),
        (119_000_000, "119 s"),
        (150_000_000, "2 min 30 s"),
    ],
)
def test_duration(us: int, words: str) -> None:
    assert duration(us) == words


def test_small_words() -> None:
    assert thousands(1234567) == "1,234,567"
    assert sentence_list(["a", "b", "c"]) == "a, b and c"
    assert sentence_list([]) == ""
    assert short_path("/a/b/c.py:1 f") == "b/c.py:1 f"
    assert short_path("C:\\a b\\c.py:1 f") == "a b/c.py:1 f"


def test_plain_shows_what_a_terminal_would_obey() -> None:
    assert plain("\x1b[31mred") == "\\x1b[31mred"
    assert plain("a\u202eb") == "a\\u202eb"
    assert plain("über × ☃") == "über × ☃"


@given(st.text())
def test_plain_is_one_printable_line(text: str) -> None:
    shown = plain(text)
    assert len(shown.splitlines()) <= 1
    assert all(unicodedata.category(c) not in {"Cc", "Cf", "Cs", "Zl", "Zp"} for c in shown)
    shown.encode("utf-8")
