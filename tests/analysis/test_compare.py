"""Runs side by side: every figure is a run's own, or the difference or quotient of two."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from memprof.analysis.allocations.differences import by_stack, stack_key, surplus
from memprof.analysis.allocations.holdings import holdings_of_analysis
from memprof.analysis.analysis import analyze
from memprof.analysis.compare import ComparisonColumn, distinct, over_limit, short_names
from memprof.analysis.published_tables import published_columns, published_tables
from memprof.config.fits import MARGIN, wide_margin
from memprof.config.gpus import CONTEXT_BYTES
from memprof.errors import InputError, UsageError
from memprof.report.codec import dumps, from_builtins
from memprof.report.comparison import Comparison
from memprof.vocabulary import GROUP_OF, Category, Group
from tests.report.files import validate
from tests.report.plain import compare, holdings_of_report
from tests.reports.compared import as_run, leaner, published_comparison, sample_comparison
from tests.reports.sample import MIB, sample
from tests.synthetic import SnapshotBuilder, frame

GIB = 2**30


def row(data: dict[str, Any], identifier: str) -> dict[str, Any]:
    found: dict[str, Any] = next(r for r in data["rows"] if r["id"] == identifier)
    return found


def test_rows_are_the_published_tables_in_its_order() -> None:
    data, _ = sample_comparison()
    assert [r["id"] for r in data["rows"]] == [str(g) for g in Group]


def test_rows_hold_each_runs_own_figures() -> None:
    first, second = sample()[0], leaner()
    data, _ = sample_comparison()
    for i, report in enumerate((first, second)):
        for entry in data["rows"]:
            assert entry["at_peak"][i] == report["peak"]["groups"][entry["id"]]
            assert entry["own_peak"][i] == report["group_own_peaks"][entry["id"]]
            for category in entry["categories"]:
                assert category["at_peak"][i] == report["peak"]["categories"][category["id"]]
                assert category["own_peak"][i] == report["own_peaks"][category["id"]]


def test_sums_hold_in_every_column_and_at_every_level() -> None:
    data, _ = sample_comparison()
    for i in range(2):
        groups = [r["at_peak"][i] for r in data["rows"][:-1]]
        assert sum(groups) == data["rows"][-1]["at_peak"][i]
        for entry in data["rows"][:-1]:
            assert sum(c["at_peak"][i] for c in entry["categories"]) == entry["at_peak"][i]
            for category in entry["categories"]:
                if category["details"]:
                    assert sum(d["at_peak"][i] for d in category["details"]) == category["at_peak"][i]


def test_differences_and_ratios_are_against_the_first() -> None:
    data, _ = sample_comparison()
    logits = row(data, "grpo_loss")
    saved = 2 * 1220 * MIB * 7 // 8
    assert logits["difference"] == [None, -saved]
    assert logits["ratio"] == [None, pytest.approx(1 / 8)]
    assert row(data, "kv_cache")["ratio"] == [None, None]
    assert row(data, "total")["difference"] == [None, -saved]


def test_json_keeps_its_schema() -> None:
    for data in (sample_comparison()[0], published_comparison()):
        validate(json.loads(dumps(data)))
    spoilt = sample_comparison()[0]
    spoilt["runs"][0]["badge"] = "guessed"
    with pytest.raises(InputError, match="guessed"):
        validate(spoilt)


def test_a_group_without_a_known_own_peak_says_so() -> None:
    report = sample()[0]
    del report["group_own_peaks"]
    data = compare([as_run(report, "a"), as_run(report, "b")])
    assert row(data, "training")["own_peak"] == [None, None]
    assert row(data, "kv_cache")["own_peak"] == [report["own_peaks"]["kv_cache"]] * 2
    assert row(data, "total")["own_peak"] == [report["peak"]["active_bytes"]] * 2


def test_a_report_that_does_not_add_up_is_refused() -> None:
    report = sample()[0]
    report["peak"]["categories"]["weights"] += 1
    with pytest.raises(InputError, match=r"b: .*categories"):
        compare([as_run(sample()[0], "a"), as_run(report, "b")])


def test_one_run_is_no_comparison() -> None:
    with pytest.raises(UsageError, match="two runs"):
        compare([as_run(sample()[0], "a")])


# ---- configuration ---------------------------------------------------------------------------------------------------


def test_config_diff_lists_what_differs_and_what_matters_first() -> None:
    other = leaner()
    other["source"]["config"]["a_folder"] = "x"
    other["source"]["torch"] = "2.14.0"
    data = compare([as_run(sample()[0], "a"), as_run(other, "b")])
    assert [(s["setting"], s["values"]) for s in data["config_diff"]] == [
        ("beta", [0.0, 0.04]),
        ("use_liger_kernel", [None, True]),
        ("a_folder", [None, "x"]),
        ("torch", ["2.13.0", "2.14.0"]),
    ]
    assert [s["matters"] for s in data["config_diff"]] == [True, True, False, False]


def test_equal_configurations_differ_in_nothing() -> None:
    data = compare([as_run(sample()[0], "a"), as_run(sample()[0], "b")])
    assert data["config_diff"] == []


def test_a_run_without_a_configuration_takes_no_part_and_is_named() -> None:
    other = sample()[0]
    other["source"]["config"] = None
    data = compare([as_run(sample()[0], "a"), as_run(other, "b")])
    assert data["config_diff"] == []
    assert any("b carries no configuration" in note for note in data["notes"])


# ---- beside the sum, capacity ----------------------------------------------------------------------------------------


def test_device_peak_and_host_stand_beside_the_sum() -> None:
    data, _ = sample_comparison()
    beside = {line["id"]: line["values"][0] for line in data["beside"]}
    device = sample()[0]["device_peak"]
    assert beside["device_peak"] == device["reserved_bytes"] + device["non_torch_bytes"]
    assert beside["pinned_bytes"] == 256 * MIB
    assert "managed_bytes" not in beside


def test_capacity_judges_by_the_device_peak_and_by_totals_where_there_is_none() -> None:
    first, trace = sample()[0], leaner("trace")
    need = first["device_peak"]["reserved_bytes"] + first["device_peak"]["non_torch_bytes"]
    room = math.ceil(need * (1 + MARGIN))
    data = compare([as_run(first, "a"), as_run(trace, "b")], room)
    assert data["capacity"]["needs"] == [need, trace["peak"]["active_bytes"] + CONTEXT_BYTES]
    assert data["capacity"]["basis"] == ["device_peak", "total"]
    assert data["capacity"]["margins"] == [MARGIN, wide_margin()]
    assert data["capacity"]["fits"] == [True, True]
    assert compare([as_run(first, "a"), as_run(trace, "b")], room - 2)["capacity"]["fits"] == [False, True]


def test_capacity_defaults_to_the_runs_own_device_where_they_agree() -> None:
    first, second = sample()[0], leaner()
    same = compare([as_run(first, "a"), as_run(second, "b")])["capacity"]
    assert (same["bytes"], same["from"]) == (25_386_352_640, "device")
    second["source"]["device_total_bytes"] = 80 * 10**9
    assert compare([as_run(first, "a"), as_run(second, "b")])["capacity"] is None
    assert compare([as_run(sample("trace")[0], "a"), as_run(leaner("trace"), "b")])["capacity"] is None


# ---- allocations -----------------------------------------------------------------------------------------------------


def run_of(*sizes: int, script: str = "train.py", times: int = 1) -> Any:
    builder = SnapshotBuilder()
    for size in sizes:
        builder.alloc(size * times, "forward", "main")
    for event in builder.events:
        for entry in event.get("frames", []):
            entry["filename"] = script
    return builder


def held(tmp_path: Path, builder: Any, name: str) -> Any:
    return holdings_of_analysis(analyze(builder.save(tmp_path / f"{name}.pickle")))


def test_the_same_run_has_nothing_over_itself(tmp_path: Path) -> None:
    one = held(tmp_path, run_of(MIB, MIB, 3 * MIB), "a")
    assert surplus(one, held(tmp_path, run_of(3 * MIB, MIB, MIB, script="/elsewhere/train.py"), "b")) == []


def test_counts_are_compared_not_sets(tmp_path: Path) -> None:
    many, few = held(tmp_path, run_of(MIB, MIB, MIB), "a"), held(tmp_path, run_of(MIB), "b")
    (found,) = surplus(many, few)
    assert (found.count_in, found.count_not_in, found.bytes) == (3, 1, 2 * MIB)
    assert surplus(few, many) == []


def test_doubling_every_size_is_a_difference(tmp_path: Path) -> None:
    sizes = (MIB, 2 * MIB, 5 * MIB)
    plain, double = held(tmp_path, run_of(*sizes), "a"), held(tmp_path, run_of(*sizes, times=2), "b")
    assert [s.each_bytes for s in surplus(double, plain)] == [10 * MIB, 4 * MIB]
    assert [s.each_bytes for s in surplus(plain, double)] == [5 * MIB, MIB]
    # 2 MiB is in both; with counts it still balances: 8 MiB of the one stand against 16 of the other.
    more, less = (sum(s.bytes for s in surplus(x, y)) for x, y in ((double, plain), (plain, double)))
    assert more - less == sum(sizes)


def test_only_in_adds_up_to_the_difference_of_the_totals(tmp_path: Path) -> None:
    runs = []
    for name, sizes in (("a", (4 * MIB, MIB, MIB)), ("b", (MIB, 7 * MIB, 2 * MIB))):
        analysis = analyze(run_of(*sizes).save(tmp_path / f"{name}.pickle"))
        runs.append(ComparisonColumn(name, "measured", analysis.report, held=holdings_of_analysis(analysis)))
    data = compare(runs)
    gained, lost = data["allocations_only_in"]
    assert (gained["in"], gained["not_in"], lost["in"], lost["not_in"]) == (1, 0, 0, 1)
    assert gained["bytes"] - lost["bytes"] == row(data, "total")["difference"][1]
    assert gained["allocations"][0]["each_bytes"] == 7 * MIB


def test_another_size_of_a_stack_is_a_change_of_that_stack(tmp_path: Path) -> None:
    small, large = SnapshotBuilder(), SnapshotBuilder()
    for build, size in ((small, 4), (large, 10)):
        for _ in range(3):
            build.alloc(size * MIB, "softmax", "forward")
        build.alloc(2 * MIB, "same", "forward")
    large.alloc(5 * MIB, "extra", "forward")
    first, other = held(tmp_path, small, "a"), held(tmp_path, large, "b")
    grew, new = by_stack(surplus(first, other), surplus(other, first))
    assert (grew.difference, grew.largest.each_bytes) == (18 * MIB, 10 * MIB)
    assert (new.difference, new.before) == (5 * MIB, ())
    (shrank, gone) = by_stack(surplus(other, first), surplus(first, other))
    assert (shrank.difference, gone.after) == (-18 * MIB, ())


def test_other_kernels_below_one_line_are_a_change_of_that_line(tmp_path: Path) -> None:
    """Under autocast the same line runs other C++ functions."""
    whole, cast = SnapshotBuilder(), SnapshotBuilder()
    whole.alloc(8 * MIB, "softmax", "forward")
    cast.alloc(4 * MIB, "softmax", "forward")
    for build, kernel in ((whole, "at::exp"), (cast, "at::to")):
        for block in build.live.values():
            block["frames"].insert(0, frame(kernel, "ops.cpp", 7))
        build.events[-1]["frames"] = next(iter(build.live.values()))["frames"]
    first, other = held(tmp_path, whole, "a"), held(tmp_path, cast, "b")
    (change,) = by_stack(surplus(first, other), surplus(other, first))
    assert change.difference == -4 * MIB
    assert change.before
    assert change.after


def test_reports_that_list_only_the_largest_are_compared_above_the_smallest_listed() -> None:
    first, second = sample()[0], sample()[0]
    first["peak"]["allocations"] = first["peak"]["allocations"][:5]
    cutoff = first["peak"]["allocations"][-1]["bytes"]
    one, other = holdings_of_report(first), holdings_of_report(second)
    assert (one.cutoff, other.cutoff) == (cutoff, 0)
    assert surplus(other, one) == []


def test_stacks_are_the_same_without_their_folders_lines_and_caller() -> None:
    one = ["/a/site-packages/torch/nn/linear.py:134 forward", "/a/site-packages/trl/grpo.py:9 step", "/me/a.py:3 main"]
    two = [r"C:\b\site-packages\torch\nn\linear.py:140 forward", r"C:\b\site-packages\trl\grpo.py:7 step", "x.py:1 go"]
    assert stack_key(one) == stack_key(two) == ("linear.py forward", "grpo.py step")
    assert stack_key(["train.py:3 main"]) != stack_key(["train.py:3 other"])
    assert stack_key([]) == ()


# ---- published rows, gate, labels ------------------------------------------------------------------------------------


def test_published_rows_add_up_and_are_badged() -> None:
    for name in published_tables():
        for column in published_columns(name):
            groups = dict(column.groups)
            assert groups.pop(Group.TOTAL) == sum(groups.values())
            assert column.source.startswith("Unsloth")
            assert any("not a peak" in note for note in column.notes)
    ours, theirs = published_columns("unsloth-2025")
    assert round(ours.groups[Group.TOTAL] / GIB, 1) == 54.3
    assert round(theirs.groups[Group.TOTAL] / GIB, 1) == 510.8
    # The two figures whose derivation is known.
    assert theirs.groups[Group.GRPO_LOSS] == pytest.approx(2 * 2 * 8 * 20480 * 128256, rel=1e-3)
    assert theirs.groups[Group.KV_CACHE] == 2 * 32 * 8 * 128 * 2 * 20480
    with pytest.raises(UsageError, match="unsloth-2025"):
        published_columns("somebody")


def test_published_columns_beside_a_run() -> None:
    data = published_comparison()
    assert [r["badge"] for r in data["runs"]] == ["measured", "published", "published"]
    assert row(data, "reference_and_reward")["at_peak"][1:] == [None, None]
    assert row(data, "unattributed")["at_peak"][1:] == [None, None]
    total = row(data, "total")
    assert total["own_peak"][1:] == [None, None]
    assert data["capacity"]["fits"] == [True, True, False]
    assert any("Not reproducible" in note for note in data["notes"])


@pytest.mark.parametrize(
    ("more", "percent", "fails"), [(2, 2.0, False), (3, 2.0, True), (-50, 0.0, False), (1, 0, True)]
)
def test_gate(more: int, percent: float, fails: bool) -> None:
    first = sample()[0]
    other = copy.deepcopy(first)
    # Exactly `more` percent: both peaks are made to be whole hundreds of bytes.
    first["peak"]["allocated_bytes"] = 7_000_000_000
    other["peak"]["allocated_bytes"] = 70_000_000 * (100 + more)
    data = compare([as_run(first, "a"), as_run(other, "b")])
    assert bool(over_limit(from_builtins(data, Comparison), percent)) is fails


def test_gate_names_the_run_and_skips_published_columns() -> None:
    data = published_comparison()
    assert over_limit(from_builtins(data, Comparison), 0) == []
    columns = [ComparisonColumn(p.label, "published", published=p) for p in published_columns("unsloth-2025")]
    with pytest.raises(UsageError, match="published"):
        over_limit(from_builtins(compare(columns), Comparison), 0)


def test_labels_are_as_short_as_they_can_be() -> None:
    paths = [Path("/r/a/_memprof/step-2.rank-0.pickle"), Path("/r/b/_memprof/step-2.rank-0.pickle"), Path("lean.json")]
    assert short_names(paths) == ["a/step-2.rank-0", "b/step-2.rank-0", "lean"]
    assert short_names([Path("x/llama-2.7b.json"), Path("x/llama-7b.pickle.gz")]) == ["llama-2.7b", "llama-7b"]
    assert short_names([Path("x/run.json"), Path("x/run.pickle")]) == ["run.json", "run.pickle"]
    assert short_names([Path("run.pickle")] * 2) == ["run.pickle"] * 2
    assert distinct(["a", "b", "a", "a"]) == ["a", "b", "a (2)", "a (3)"]


def test_every_category_has_its_row() -> None:
    report = sample()[0]
    report["peak"]["categories"] = {str(c): (i + 1) * MIB for i, c in enumerate(Category)}
    report["peak"]["active_bytes"] = sum(report["peak"]["categories"].values())
    report["peak"]["details"] = {}
    data = compare([as_run(report, "a"), as_run(report, "b")])
    shown = {c["id"]: r["id"] for r in data["rows"] for c in r["categories"]}
    assert shown == {str(c): str(g) for c, g in GROUP_OF.items()}


@pytest.mark.parametrize("pair", [("cs336-medium-train-ctx256-t211", "cs336-medium-train-ctx1024-t211")])
def test_real_snapshots(shared: Path, pair: tuple[str, str]) -> None:
    runs = []
    for name in pair:
        analysis = analyze(shared / "snapshots" / f"{name}.pickle")
        runs.append(ComparisonColumn(name, "measured", analysis.report, held=holdings_of_analysis(analysis)))
    data = json.loads(dumps(compare(runs)))
    validate(data)
    gained, lost = data["allocations_only_in"]
    assert gained["bytes"] - lost["bytes"] == row(data, "total")["difference"][1]
