"""What the pages and screens say of the simulator's accuracy is what its benchmarks found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.simulator import classes, decisions
from benchmarks.simulator import comparisons as simulated
from benchmarks.simulator.emulated import edges, matrix

MEASUREMENTS = (Path(__file__).resolve().parents[3] / "benchmarks" / "measurements.md").read_text(encoding="utf-8")
PAGE = " ".join(MEASUREMENTS.split())
ROWS = json.loads(simulated.RESULTS.read_text())["comparisons"]


def test_screens_quote_the_results() -> None:
    assert json.loads(simulated.PACKAGED.read_text(encoding="utf-8")) == classes.gathered()


def test_nine_of_ten_comparisons_lie_in_the_range_of_the_others_of_their_class() -> None:
    found = classes.gathered()
    outside = classes.outside(found)
    assert len(outside) <= 0.1 * len(found["comparisons"])
    assert all(f"*{name}*" in PAGE for name in outside)
    for where in {row["where"] for row in found["comparisons"]}:
        names = [row["name"] for row in found["comparisons"] if row["where"] == where]
        assert sum(name in outside for name in names) <= 0.1 * len(names), where


def test_a_comparison_far_from_the_others_is_counted_outside() -> None:
    rows = [{"simulated_bytes": 100 + error, "measured_bytes": 100} for error in (0, 1, 2, 1, 0, 2, 30)]
    assert classes.inside(rows) == [True] * 6 + [False]


def test_no_run_is_said_to_fit_below_its_edge() -> None:
    rows = edges.read()
    for name, row in rows.items():
        edge = row["real"]["edge_bytes"]
        assert all(lives == (int(card) >= edge) for card, lives in row["real"]["tried"].items()), name
        made, unknown = row["said"]["by_make"], row["said"]["by_size"] or row["said"]["by_make"]
        assert edge <= min(made, unknown), name
        assert made <= unknown + 2**20, name  # each to within 1 MiB
        assert row["said"]["by_make"] <= 1.05 * edge or f"*{name}*" in PAGE, name


def test_every_case_was_run() -> None:
    names = {row["name"] for row in ROWS}
    assert set(simulated.CAPTURES) | set(simulated.RUNS) <= names


def test_each_row_that_differs_from_the_real_allocator_has_a_reason() -> None:
    explained = " ".join(MEASUREMENTS.split("## Compared with the real allocator")[1].partition("\n## ")[0].split())
    for name, row in matrix.read().items():
        same = all(row["simulated"][kind] == row["measured"][kind] for kind in ("allocated_bytes", "reserved_bytes"))
        assert same or f"*{name}*" in explained, name


def test_decisions_are_what_the_results_give() -> None:
    found = decisions.decisions()
    assert found == json.loads((simulated.RESULTS.parent / "decisions.json").read_text())
    measured = {name: row for name, row in found.items() if not name.startswith("the published table")}
    assert all(row["false_fits"] == 0 for row in measured.values())
    assert any(row["of_runs_that_do_not"] for row in measured.values())
    named = [row for name, row in measured.items() if name.endswith("every named GPU")]
    assert all(row["false_does_not_fit"] <= 0.05 * row["of_runs_that_fit"] for row in named)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['name']}, {row['what']}")
def test_no_prediction_is_further_off_than_three_percent(row: dict[str, object]) -> None:
    mine, theirs = float(str(row["simulated_bytes"])), float(str(row["measured_bytes"]))
    assert abs(mine / theirs - 1) <= 0.03


def test_wrong_verdicts_are_counted_as_such() -> None:
    counted = decisions.count([(True, True), (True, False), (False, True), (False, False)])
    assert counted == {
        "decisions": 4,
        "false_fits": 1,
        "false_does_not_fit": 1,
        "of_runs_that_fit": 2,
        "of_runs_that_do_not": 2,
    }
