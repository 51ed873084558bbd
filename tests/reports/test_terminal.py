"""Terminal output, line by line. MEMPROF_UPDATE_SNAPSHOTS=1 rewrites what is expected; then look at the difference."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest
from memprof.reports.document.blocks import Code, Column, ReportLayout, TableRow, table
from memprof.reports.palette import LETTERS
from memprof.reports.renderers import draw
from memprof.reports.terminal.draw import draw as draw_sheet
from memprof.reports.terminal.report import print_document, render_short
from memprof.reports.terminal.screen import console_of, text_of
from memprof.reports.terminal.table import draw_table

from memprof.vocabulary import Category
from tests.reports.document.drawn import render_terminal
from tests.reports.sample import hostile, sample
from tests.reports.typed import build_document, rows_of

EXPECTED = Path(__file__).parent / "snapshots"


def same(name: str, text: str) -> None:
    path = EXPECTED / name
    if os.environ.get("MEMPROF_UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_snapshot_without_colour(width: int) -> None:
    text = render_terminal(build_document(*sample()), width)
    assert max(len(line) for line in text.split("\n")) <= width
    assert "\x1b" not in text
    same(f"terminal-{width}.txt", text)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_snapshot_with_colour(width: int) -> None:
    text = render_terminal(build_document(*sample()), width, colour=True)
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(len(line) for line in bare.split("\n")) <= width
    same(f"terminal-{width}-colour.txt", text)


def test_snapshot_of_explanations() -> None:
    listed = sample()[0]["peak"]["allocations"][:6]
    same("explain-80.txt", draw("explain", rows_of(listed, sum(a["bytes"] for a in listed)), width=80))


def test_trace_report_fits_and_names_no_device() -> None:
    text = render_terminal(build_document(*sample("trace")), 80)
    assert "Peak tensor memory: 6.78 GiB" in text
    assert "Headroom" not in text


def test_numbers_are_never_cut_short() -> None:
    for width in (40, 60, 80, 100, 120, 200):
        text = render_terminal(build_document(*sample()), width)
        assert not re.search(r"\d\.?\d?…", text), width


def test_hostile_names_reach_the_terminal_as_text() -> None:
    report, series = hostile()
    text = render_terminal(build_document(report, series), 100)
    listed = report["peak"]["allocations"]
    text += draw("explain", rows_of(listed, sum(a["bytes"] for a in listed)))
    assert not set(text) & {"\x1b", "\x07", "\x00", "\r", "\u202e", "\u2028"}
    assert "[bold red]markup[/bold red]" in text
    assert "\ufffd[31mred" in text


def test_a_terminal_that_knows_ascii_only() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_document(build_document(*sample()), stream)
    text = raw.getvalue().decode("ascii")
    assert "Generate x2" in text
    assert "6.78 GiB in backward" in text


def test_short_form_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = render_short(build_document(*sample()))
    assert "Total" in text
    assert "6.78 GiB in backward" in text
    assert len(text.split("\n")) < 36


def test_letters_tell_categories_apart() -> None:
    assert {str(c) for c in Category} <= set(LETTERS)
    assert len(set(LETTERS.values())) == len(LETTERS)


def test_the_widest_column_of_words_gives_way_first() -> None:
    columns = ("Name", "Value", Column("Blocks", whole=True), Column("GiB", right=True))
    lines = [TableRow(("a" * 90, "short", "2 × 152.50 MiB", 3 * 2**29)), TableRow(("b", "–", "1", None))]
    found = table(columns, lines)
    assert found is not None
    console = console_of(50, colour=False)
    console.print(*draw_table(found, 50, colour=False))
    first = text_of(console).splitlines()[1]
    assert first == f"{'a' * 18}…  short  2 × 152.50 MiB    1.50"


def test_headings_and_names_stay_one_whole_line() -> None:
    """Headings are words, whatever they end in; a name with a line break or a terminal's order takes one line."""
    columns = ("Run of step 12>", Column("2 > 1|0", right=True), Column("H100 !", wide=True))
    found = table(columns, [TableRow(("a\nb\x1b[31mc", 2**30, "x\ty"))])
    assert found is not None
    console = console_of(80, colour=False)
    console.print(*draw_table(found, 80, colour=False))
    assert text_of(console).splitlines()[:2] == [
        "Run of step 12>  2 > 1|0, GiB  H100 !",
        r"a\x0ab\x1b[31mc          1.00  x\x09y",
    ]


def test_settings_to_paste_are_never_broken_and_a_frame_is_cut_at_its_beginning() -> None:
    setting, frame = f"args = GRPOConfig({'x' * 90})", f"/{'deep/' * 20}model.py:12 forward"
    sheet = ReportLayout(((Code((setting,), "python"), Code((frame,), paths=True)),))
    first, second = draw_sheet(sheet, 60).splitlines()
    assert first == setting
    assert second.startswith("…/")
    assert second.endswith("/model.py:12 forward")
    assert len(second) <= 60
