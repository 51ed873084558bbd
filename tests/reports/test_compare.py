"""What is shown of a comparison: words, terminal line by line, markdown, the page as text. MEMPROF_UPDATE_SNAPSHOTS=1
rewrites what is expected; then look at the difference."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from memprof.reports.document.comparison import ComparisonDocument, ratio_words
from memprof.reports.document.text import plain
from memprof.reports.html.compare import render_comparison as render_page
from memprof.reports.renderers import draw
from memprof.reports.terminal.screen import write_to

from memprof.analysis.compare import ComparisonColumn
from memprof.analysis.headline import change_words
from memprof.analysis.published_tables import published_columns
from memprof.report.codec import to_json
from memprof.text import clean_text
from memprof.units import gib
from tests.report.plain import compare
from tests.reports.compared import as_run, hostile_comparison, leaner, published_comparison, sample_comparison
from tests.reports.html.test_html import Page, packed
from tests.reports.sample import HOSTILE, MIB, sample
from tests.reports.test_terminal import same
from tests.reports.typed import build_comparison, comparison_of


def render_comparison(found: ComparisonDocument, width: int = 100, colour: bool = False) -> str:
    return draw("compare", found, "text", width, colour)


def render_markdown(found: ComparisonDocument) -> str:
    return draw("compare", found, "markdown")


def test_runs_whose_names_differ_in_the_middle_have_columns_of_their_own() -> None:
    data = compare([as_run(sample()[0], "linear-grad-t24"), as_run(leaner(), "linear-nograd-t24")])
    lines = render_comparison(build_comparison(data), 80).splitlines()
    head = next(line for line in lines if line.startswith("GiB at the peak"))
    assert "…grad-t24" in head
    assert "…nograd-…" in head


@pytest.mark.parametrize(
    ("first", "other", "words"),
    [
        (100, 10, "90% less"),
        (5108, 543, "89% less"),
        (100, 95, "5.0% less"),
        (100, 100, "same"),
        (100, 0, "none"),
        (0, 100, "new"),
        (0, 0, "same"),
        (100, 112, "12% more"),
        (100, 940, "9.4× as much"),
        (1000, 1, ">99% less"),
        (10**6, 10**6 + 1, "<0.1% more"),
        (None, 5, "–"),
        (5, None, "–"),
    ],
)
def test_changes_in_words(first: int | None, other: int | None, words: str) -> None:
    assert change_words(first, other) == words


def test_what_is_nothing_at_one_peak_may_be_there_at_another_time() -> None:
    gib = 2**30
    assert change_words(3 * gib, 0, 3 * gib, round(3.05 * gib)) == "0 then, 3.05 at most"
    assert change_words(0, gib, 2 * gib, gib) == "0 before, 2.00 at most"
    assert change_words(gib, 0, gib, 0) == "none"
    assert change_words(gib, gib // 2, gib, gib) == "50% less"


def test_runs_that_peak_in_different_phases_are_compared_in_both() -> None:
    """One run's peak moves to generation: each of the two phases has a row with both runs' highest in it."""
    report, other = sample()[0], sample()[0]
    other["peak"]["phase"] = "generate"
    data = compare([as_run(report, "a"), as_run(other, "b")])
    rows = {row["id"]: row for row in data["beside"]}
    for phase in ("backward", "generate"):
        highest = max(p["peak_bytes"] for p in report["phases"] if p["phase"] == phase)
        assert rows[f"phase:{phase}"]["values"] == [highest, highest]
    found = build_comparison(data)
    assert "The peaks are at different moments: a in backward, step 2; b in" in found.headline.cause
    assert not any(
        row["id"].startswith("phase:") for row in compare([as_run(report, "a"), as_run(report, "b")])["beside"]
    )


def test_published_rows_say_in_the_title_what_was_measured() -> None:
    runs = [as_run(sample()[0], "mine")]
    runs += [ComparisonColumn(c.label, "published", published=c) for c in published_columns("unsloth-2025")]
    found = build_comparison(compare(runs))
    assert found.title == ("mine and 2 others (published for Llama-3.1-8B, 20480 tokens of context, 8 generations)")


def test_how_many_times_the_device_is_said_of_the_figure_beside_it() -> None:
    data = compare([as_run(sample()[0], "a"), as_run(sample()[0], "b")], 2 * 2**30)
    need = data["capacity"]["needs"][0]
    words = build_comparison(data).verdicts[0][1]
    assert words == f"no, {need / 2**30:.2f} GiB, {need / 2**31:.1f}× the device"


def test_each_run_says_how_far_from_out_of_memory_it_was() -> None:
    data = compare([as_run(sample()[0], "a"), as_run(sample()[0], "b")], 8 * 2**30)
    found = build_comparison(data)
    rooms = [column.room for column in found.columns if column.room is not None]
    assert [room.capacity_bytes for room in rooms] == [8 * 2**30] * 2
    text = render_comparison(found, 80)
    assert text.count("¦") >= 4
    for words in (text.replace("\n", " "), render_page(found), render_markdown(found).replace("\\", "")):
        assert rooms[0].sentence in words


def test_ratios_in_words() -> None:
    assert [ratio_words(r) for r in (None, 0.0, 0.001, 0.106, 1.0, 9.41, 12.34)] == [
        *("–", "0.00×", "<0.01×", "0.11×", "1.00×", "9.41×", "12.3×")
    ]


def test_headline_says_who_needs_how_much_and_why() -> None:
    data, documents = sample_comparison()
    found = build_comparison(data, documents).headline
    saved = 2 * 1220 * 7 // 8 / 1024
    assert found.verdict.startswith("lean allocates at its peak 4.70 GiB, 31% less than trl (6.78 GiB)")
    assert found.cause.startswith(f"Largest difference: loss logits, −{saved:.2f} GiB")
    # The other run has smaller blocks of the same stack: only the difference is this line's.
    assert "alone" not in found.cause
    assert found.cause.endswith(f", of it −{saved:.2f} GiB in forward (chunked_logprob.py:88).")
    assert [place["bytes"] for place in data["headline"]["places"]] == [2 * 1220 * MIB * 7 // 8]
    for place in data["headline"]["places"]:
        assert place["share"] <= 1
        assert any(place["frame"] in a["stack"] for e in data["allocations_only_in"] for a in e["allocations"])


def test_against_published_rows_the_largest_difference_is_one_that_is_known() -> None:
    found = build_comparison(published_comparison()).headline
    assert found.verdict.startswith("Unsloth (published) comes to 54.30 GiB")
    assert "TRL + FA2 (published): training memory, +409.6" in found.cause


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("colour", [False, True])
def test_terminal_snapshot(width: int, colour: bool) -> None:
    text = render_comparison(build_comparison(*sample_comparison()), width, colour)
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(len(line) for line in bare.split("\n")) <= width
    assert ("\x1b" in text) is colour
    same(f"compare-{width}{'-colour' if colour else ''}.txt", text)


def test_terminal_snapshot_beside_published_rows() -> None:
    same("compare-published-80.txt", render_comparison(build_comparison(published_comparison()), 80))


@pytest.mark.parametrize("width", [40, 60, 70, 80, 100, 120, 160, 200])
@pytest.mark.parametrize("n_runs", [2, 3, 6])
def test_figures_are_never_cut_short_and_every_run_is_shown(width: int, n_runs: int) -> None:
    reports = [leaner() if i % 2 else sample()[0] for i in range(n_runs)]
    labels = [f"run number {i}" for i in range(n_runs)]
    data = compare([as_run(r, label) for r, label in zip(reports, labels, strict=True)], 8 * 2**30)
    text = render_comparison(build_comparison(data), width)
    assert max(len(line) for line in text.split("\n")) <= width
    table = text[text.index("GiB at the peak") :]
    assert not re.search(r"\d\.?\d?…", table)
    totals = re.findall(r"^Total .*$", table, re.MULTILINE)
    shown = [figure for line in totals for figure in re.findall(r"(?<![−+.\d])\d+\.\d\d(?![\d×])", line)]
    assert {gib(r["peak"]["active_bytes"]) for r in reports} <= set(shown)
    heads = re.findall(r"^GiB at the peak.*$", table, re.MULTILINE)
    assert len(heads) == len(totals)


def test_ascii_terminals() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    write_to(stream, render_comparison(build_comparison(*sample_comparison())))
    text = raw.getvalue().decode("ascii")
    assert "31% less" in text


def test_markdown_snapshot() -> None:
    same("compare.md", render_markdown(build_comparison(*sample_comparison())))


def test_hostile_names_are_text_everywhere() -> None:
    shown = build_comparison(*hostile_comparison())
    harmful = {"\x1b", "\x07", "\x00", "\r", "\u202e", "\u2028", "\ud800"}
    terminal, markdown, page = render_comparison(shown, 100), render_markdown(shown), render_page(shown)
    assert not set(terminal + markdown + page) & harmful
    outside_code = re.sub(r"(`+) ?.*?\1", "", markdown)
    assert "<script>alert" not in outside_code
    assert "@everyone" not in outside_code.replace("\\@everyone", "")
    parsed = Page(page)
    assert parsed.open == []
    assert [tag for tag, _ in parsed.tags].count("script") == 3
    assert "img" not in [tag for tag, _ in parsed.tags]
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on")]
    words = "".join(parsed.words)
    for name in HOSTILE:
        assert plain(clean_text(name), keep="\n")[1:] in words


@pytest.fixture(scope="module")
def page() -> str:
    return render_page(build_comparison(*sample_comparison()))


def test_page_reads_without_scripts(page: str) -> None:
    parsed = Page(page)
    assert parsed.open == []
    words = "".join(parsed.words)
    for expected in (
        "6.78",
        "4.70",
        "31% less",
        "use_liger_kernel",
        "Fits in 7.00 GiB",
        "Loss logits",
    ):
        assert expected in words
    pictures = [a for tag, a in parsed.tags if tag == "svg"]
    assert len(pictures) == 2


def test_page_asks_the_network_for_nothing_and_is_small(page: str) -> None:
    for _, attributes in Page(page).tags:
        assert not {"src", "srcset", "data", "action", "poster"} & set(attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert len(page.encode()) < 3_000_000


def test_page_holds_the_comparison_and_both_timelines(page: str) -> None:
    data, _ = sample_comparison()
    held = packed(page)
    assert held["report"] == json.loads(to_json(comparison_of(data)))
    assert len(held["timelines"]) == 2


def bars(page: str, path: str) -> list[tuple[str, float]]:
    """``(colour, percent)`` of each segment in the row of ``path``."""
    found = re.search(rf'<tr [^>]*data-path="{path}".*?</tr>', page, re.DOTALL)
    assert found is not None
    return [(c, float(w)) for c, w in re.findall(r'class="seg c-([a-z_]+)" style="width:([\d.]+)%"', found.group())]


def test_bars_share_one_scale_and_groups_are_their_categories(page: str) -> None:
    data, _ = sample_comparison()
    rows: dict[str, Any] = {r["id"]: r for r in data["rows"]}
    scale = max(*(line["values"][0] for line in data["beside"] if line["id"] == "device_peak"), 7 * 2**30)
    for i, (_, width) in enumerate(bars(page, "total")):
        assert width == pytest.approx(100 * rows["total"]["at_peak"][i] / scale, abs=1e-3)
    both = sum(width for _, width in bars(page, "training"))
    assert both == pytest.approx(100 * sum(rows["training"]["at_peak"]) / scale, abs=0.01)
    assert len(bars(page, "training")) > 4


def test_capacity_is_a_dashed_line_where_it_belongs(page: str) -> None:
    line = re.search(r'<tr class="level0 total".*?</tr>', page, re.DOTALL)
    assert line is not None
    data, _ = sample_comparison()
    scale = next(n for row in data["beside"] if row["id"] == "device_peak" for n in row["values"])
    places = [float(x) for x in re.findall(r'class="cap" style="left:([\d.]+)%"', line.group())]
    assert places == [pytest.approx(100 * 7 * 2**30 / scale, abs=1e-2)] * 2


def test_reproduce_names_what_was_asked_for() -> None:
    shown = build_comparison(published_comparison()).reproduce[0].value
    assert shown == (
        "memprof compare step-000002.rank-0.pickle --published unsloth-2025 --capacity 80GB -o compare.html"
    )
    shown = build_comparison(*sample_comparison()).reproduce[0].value
    assert shown == "memprof compare step-000002.rank-0.pickle lean.pickle --capacity 7GiB -o compare.html"


def test_legend_names_each_colour_once_as_the_first_run_does() -> None:
    legend = {p.id: p.label for p in build_comparison(published_comparison()).legend}
    assert legend["loss_logits"] == "Loss logits"
    assert legend["training"] == "Training memory"
    assert len(legend) == len(set(legend.values()))


def test_page_without_timelines_needs_no_plotly() -> None:
    text = render_page(build_comparison(published_comparison()))
    assert "Plotly, Inc" not in text
    assert "not a peak" in text
    assert len(text) < 300_000


def test_verdict_and_distance_from_out_of_memory_give_one_number() -> None:
    """A CUDA context that nobody measured counts in both: ``0.52 GiB too much`` never stands beside ``0.07 left``."""
    data, _ = sample_comparison(24 * 2**30)
    for run in data["runs"]:
        run["report"]["device_peak"]["non_torch_bytes"] = None
        run["report"]["peak"]["non_torch_bytes"] = None
    data["capacity"]["needs"] = [n + 600 * 2**20 for n in data["capacity"]["needs"]]
    data["capacity"]["left"] = [n - 600 * 2**20 for n in data["capacity"]["left"]]
    document = build_comparison(data)
    for column, (_, words), need in zip(document.columns, document.verdicts, data["capacity"]["needs"], strict=True):
        assert column.room is not None
        assert column.room.sentence.endswith(f": {words}.")
        assert sum(part.bytes for part in column.room.parts if part.id != "free") == need


def test_rows_that_no_run_used_are_left_out_and_named() -> None:
    document = build_comparison(*sample_comparison())
    shown = {line.path[0] for line in document.rows.lines if line.path}
    assert not shown & {"reference_and_reward", "inference"}
    assert {"kv_cache", "unattributed", "total"} <= shown
    assert document.notes[0] == "Not shown, because always zero: reference and reward models and inference cost."
