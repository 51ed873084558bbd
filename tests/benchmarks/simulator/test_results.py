"""What the pages and screens say of the simulator's accuracy is what its benchmarks found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.simulator import comparisons as simulated
from benchmarks.simulator import decisions, rivals
from benchmarks.simulator.emulated import matrix
from examples import published_tables
from memprof.config.expected_error import MARGIN, comparisons

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "accuracy.md").read_text(encoding="utf-8")
ROWS = json.loads(simulated.RESULTS.read_text())["comparisons"]


def test_screens_quote_the_results() -> None:
    assert list(comparisons()) == ROWS


def test_every_case_was_run() -> None:
    names = {row["name"] for row in ROWS}
    assert set(simulated.CAPTURES) | set(simulated.RUNS) <= names


def test_the_page_holds_every_table() -> None:
    results = simulated.RESULTS.parent
    assert simulated.table(ROWS).strip() in PAGE
    assert decisions.table(json.loads((results / "decisions.json").read_text())).strip() in PAGE
    assert rivals.table(json.loads((results / "rivals.json").read_text())).strip() in PAGE
    assert published_tables.methods_table(published_tables.kept(results / "published_methods.json")).strip() in PAGE
    assert published_tables.sft_table(published_tables.kept(results / "published_sft.json")).strip() in PAGE
    components = results / "published_components.json"
    if components.is_file():
        assert published_tables.components_table(published_tables.kept(components)).strip() in PAGE


def test_the_page_holds_the_rows_of_the_real_allocator() -> None:
    assert matrix.table(matrix.read()) in PAGE


def test_each_row_that_differs_from_the_real_allocator_has_a_reason() -> None:
    explained = PAGE.split("## Beside the real allocator")[1].partition("\n- ")[2].partition("\n## ")[0]
    for name, row in matrix.read().items():
        same = all(row["simulated"][kind] == row["measured"][kind] for kind in ("allocated_bytes", "reserved_bytes"))
        assert same or f"*{name}*" in " ".join(explained.split()), name


def test_decisions_are_what_the_results_give() -> None:
    found = decisions.decisions()
    assert found == json.loads((simulated.RESULTS.parent / "decisions.json").read_text())
    measured = [found["captures on every named card"], found["captures on cards within 20 % of their need"]]
    assert all(row["false_fits"] == 0 for row in measured)
    named = measured[0]
    assert named["false_does_not_fit"] <= 0.05 * named["of_runs_that_fit"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['name']}, {row['what']}")
def test_no_prediction_is_further_off_than_the_margin(row: dict[str, object]) -> None:
    mine, theirs = float(str(row["simulated_bytes"])), float(str(row["measured_bytes"]))
    assert abs(mine / theirs - 1) <= MARGIN


def test_wrong_verdicts_are_counted_as_such() -> None:
    counted = decisions.count([(True, True), (True, False), (False, True), (False, False)])
    assert counted == {
        "decisions": 4,
        "false_fits": 1,
        "false_does_not_fit": 1,
        "of_runs_that_fit": 2,
        "of_runs_that_do_not": 2,
    }
