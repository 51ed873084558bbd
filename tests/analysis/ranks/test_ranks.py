"""Ranks side by side, without a run: summaries, what sets them apart, files found, what is missing, what is shown."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memprof.reports.document.ranks import ranks_of
from memprof.reports.html.report import render_html

from memprof.analysis.ranks.files import choose, find_recordings, recording_of
from memprof.analysis.ranks.merge import missing_ranks, world_size_of
from memprof.analysis.ranks.summary import check_summary
from memprof.errors import InputError, UsageError
from memprof.redact import redact
from memprof.report.codec import plain_entries, to_builtins
from tests.analysis.ranks.simulated import many_ranks, rank_report
from tests.report.counters import append, counters_file
from tests.report.files import validate
from tests.report.plain import across, as_report, fullest, merged, rank_summary
from tests.reports.document.drawn import render_markdown, render_terminal
from tests.reports.sample import HOSTILE, MIB, sample
from tests.reports.typed import build_document


def summaries(*factors: float) -> list[dict[str, Any]]:
    return [rank_summary(rank_report(r, len(factors), f)) for r, f in enumerate(factors)]


# -- summaries -------------------------------------------------------------------------------------------------------


def test_a_summary_is_kilobytes_and_says_what_the_report_says() -> None:
    report = rank_report(5, 8, 1.2)
    summary = rank_summary(report)
    assert len(json.dumps(summary)) < 8000 < len(json.dumps(report))
    assert (summary["rank"], summary["node"], summary["tokens"]) == (5, "gpu-000", 9600)
    assert sum(summary["peak"]["categories"].values()) == report["peak"]["active_bytes"]
    for phase in summary["phases"]:
        spans = [p["peak_bytes"] for p in report["phases"] if p["phase"] == phase["phase"]]
        assert phase["peak_bytes"] == max(spans)
    validate({**report, "ranks": [summary], "across_ranks": across([summary], 8)})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.update(rank=-1),
        lambda s: s.update(rank=True),
        lambda s: s.update(node=3),
        lambda s: s["peak"].update(active_bytes="much"),
        lambda s: s["peak"]["categories"].update(gold=1),
        lambda s: s["peak"]["categories"].update(weights=2**70),
        lambda s: s.update(phases=[{"phase": "nap"}]),
        lambda s: s.pop("device_peak"),
    ],
)
def test_damaged_summaries_are_refused(spoil: Any) -> None:
    summary = rank_summary(rank_report(0, 2))
    assert to_builtins(check_summary(summary)) == summary
    spoil(summary)
    with pytest.raises(InputError, match="damaged"):
        check_summary(summary)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
@settings(max_examples=50, deadline=None)
def test_anything_else_is_refused_too(anything: Any) -> None:
    with pytest.raises(InputError):
        check_summary(anything)


# -- across ----------------------------------------------------------------------------------------------------------


def test_spreads_are_the_ranks_own_figures() -> None:
    ranks = summaries(1.0, 1.3, 0.9, 1.1)
    found = across(ranks, 4)
    peaks = [r["peak"]["active_bytes"] for r in ranks]
    assert found["peak"] == {
        "highest_rank": 1, "highest_bytes": max(peaks), "lowest_rank": 2, "lowest_bytes": min(peaks),
        "median_bytes": statistics.median_low(peaks), "mean_bytes": round(statistics.mean(peaks)),
        "total_bytes": sum(peaks), "imbalance": max(peaks) / statistics.mean(peaks) - 1,
    }  # fmt: skip
    for row in found["categories"]:
        assert row["total_bytes"] == sum(r["peak"]["categories"].get(row["category"], 0) for r in ranks)
    assert sum(row["total_bytes"] for row in found["categories"]) == sum(peaks)
    backward = next(p for p in found["phases"] if p["phase"] == "backward")
    assert backward["highest_bytes"] == max(peaks)


def test_a_sum_over_ranks_is_valid_whatever_they_say() -> None:
    ranks = summaries(1, 1, 1)
    for rank in ranks:
        for phase in rank["phases"]:
            phase["peak_bytes"] = 2**62
    found = across(ranks, 3)
    assert {spread["total_bytes"] for spread in found["phases"]} == {3 * 2**62}
    validate({**rank_report(0, 3, 1), "ranks": ranks, "across_ranks": found})


def test_equal_ranks_differ_in_nothing() -> None:
    found = across(summaries(1, 1, 1), 3)
    assert found["differences"] == []
    assert (found["peak"]["imbalance"], found["peak"]["highest_rank"]) == (0, 0)


def test_the_fullest_rank_and_rank_0_are_explained() -> None:
    """Tokens explain the fullest rank; rank 0 gathers weights; the figures are those above the median rank."""
    ranks = summaries(1.0, 1.4, 1.0, 1.0)
    for part in (ranks[0]["peak"], next(p for p in ranks[0]["phases"] if p["phase"] == "backward")):
        part["categories"]["weights"] += 500 * MIB
    ranks[0]["peak"]["active_bytes"] += 500 * MIB
    found = across(ranks, 4)["differences"]
    by_rank = {rank: [d for d in found if d["rank"] == rank] for rank in (0, 1)}
    assert by_rank[0][0]["category"] == "weights"
    assert by_rank[0][0]["bytes"] == 500 * MIB
    assert by_rank[0][0]["reason"] == ""  # nothing recorded says why
    first = by_rank[1][0]
    median = statistics.median_low(r["peak"]["categories"]["loss_logits"] for r in ranks)
    assert (first["category"], first["median_bytes"]) == ("loss_logits", median)
    assert first["bytes"] == ranks[1]["peak"]["categories"]["loss_logits"] - median
    assert first["reason"] == "11,200 tokens in that step where the median rank had 8,000"


def test_more_activations_without_more_tokens_are_not_put_down_to_length() -> None:
    ranks = summaries(1.4, 1.0, 1.0)
    for r in ranks:
        r["tokens"] = 8000
    assert all("not more tokens" in d["reason"] for d in across(ranks, 3)["differences"])


def test_without_tokens_nothing_is_said_of_lengths() -> None:
    """Other tools' snapshots count no tokens: what differs is said, and no reason."""
    ranks = summaries(1.0, 1.4, 1.0)
    for r in ranks:
        r["tokens"] = None
    found = across(ranks, 3)["differences"]
    assert [d["category"] for d in found][:1] == ["loss_logits"]
    assert {d["reason"] for d in found} == {""}
    report = merged(rank_report(1, 3, 1.4), ranks, 3, [])
    for words in (render_terminal(build_document(report), 100), render_html(build_document(report))):
        assert "longer" not in words


def test_memory_outside_torch_on_the_first_device() -> None:
    ranks = summaries(1, 1, 1, 1)
    ranks[0]["device_peak"]["non_torch_bytes"] += 3000 * MIB
    (found,) = across(ranks, 4)["differences"]
    assert (found["category"], found["bytes"], found["rank"]) == ("non_torch", 3000 * MIB, 0)
    assert found["reason"] == ""


def test_a_rank_that_peaks_in_another_phase_is_compared_in_the_same_one() -> None:
    ranks = summaries(1, 1, 1)
    ranks[2]["peak"] |= {"phase": "generate", "categories": {"kv_cache": 90_000 * MIB}, "active_bytes": 90_000 * MIB}
    ranks[2]["phases"].append(
        {"phase": "generate", "peak_bytes": 90_000 * MIB, "categories": {"kv_cache": 90_000 * MIB}}
    )
    found = across(ranks, 3)["differences"]
    assert found
    assert {d["phase"] for d in found if d["rank"] == 2} == {"generate"}


# -- merging ---------------------------------------------------------------------------------------------------------


def test_one_that_ran_out_of_memory_is_looked_at_first() -> None:
    ranks = summaries(1.0, 1.4, 0.8)
    assert fullest(ranks) == 1
    ranks[2]["oom"] = {"requested_bytes": 1, "device_free_bytes": 0, "phase": "forward", "step": 3}
    assert fullest(ranks) == 2


def test_world_sizes_and_what_is_missing(tmp_path: Path) -> None:
    assert world_size_of([8, 8, 1, None], [0, 1]) == 8
    assert world_size_of([1, 1], [0, 1]) is None
    with pytest.raises(InputError, match="memprof compare"):
        world_size_of([8, 4], [0])
    file = counters_file(tmp_path / "_memprof", 2, {"world_size": 4})
    append(file, {"step": 56, "peak_allocated": 7 * MIB})
    append(file, {"step": 57, "peak_allocated": 5 * MIB})
    assert plain_entries(missing_ranks([0, 3], 4, tmp_path)) == [
        {"rank": 1, "last_step": None, "peak_allocated_bytes": None},
        {"rank": 2, "last_step": 57, "peak_allocated_bytes": 7 * MIB},
    ]


def test_two_summaries_of_one_rank_are_no_run() -> None:
    with pytest.raises(InputError, match="rank 1 is there twice"):
        merged(rank_report(0, 2), [rank_summary(rank_report(1, 2)) for _ in range(2)], 2, [])


# -- files -----------------------------------------------------------------------------------------------------------


def touch(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()


def test_the_newest_step_that_most_ranks_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "_memprof"
    names = [
        f"step-{s:06d}.rank-{r}.pickle" for s, ranks in ((2, (0, 1, 2)), (9, (0, 1, 2)), (57, (1,))) for r in ranks
    ]
    touch(folder, *names, "step-000009.rank-1.json", "step-000009.ranks.json", "report.html", "counters.rank-0.jsonl")
    found = find_recordings(tmp_path)
    chosen = choose(found)
    assert [(r.step, r.rank, r.report is not None) for r in chosen] == [(9, 0, False), (9, 1, True), (9, 2, False)]
    assert [r.rank for r in choose(found, 57)] == [1]
    with pytest.raises(UsageError, match="recordings of step 2, 9, 57"):
        choose(found, 3)


@pytest.mark.parametrize(
    "name", ["rank3_memory_snapshot.pickle", "mem_rank_3.pkl", "snapshot-rank-3.pickle.gz", "oom_rank3.pickle"]
)
def test_names_other_tools_give(tmp_path: Path, name: str) -> None:
    touch(tmp_path, name, "notes.txt", "frank3.txt")
    (found,) = find_recordings(tmp_path)
    assert found.rank == 3 == recording_of(tmp_path / name).rank
    assert recording_of(tmp_path / "franklin7.pickle").rank is None


def test_a_folder_without_any(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no recordings there"):
        find_recordings(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        find_recordings(tmp_path / "nowhere")


# -- shown -----------------------------------------------------------------------------------------------------------


def test_everything_shown_adds_up_and_says_who_is_missing() -> None:
    report = many_ranks(24, missing=(3, 4, 5, 17))
    validate(report)
    document = build_document(report)
    ranks = document.ranks
    assert ranks is not None
    assert (ranks.count, ranks.world_size) == (20, 24)
    assert ranks.missing == "No readable recording of ranks 3–5 and 17."
    peaks = [r.peak_bytes for r in ranks.rows]
    assert peaks == sorted(peaks, reverse=True)
    assert all(sum(c.bytes for c in row.cells) == row.peak_bytes for row in ranks.rows)
    assert ranks.nodes is not None
    together = [line.cells[-1] for line in ranks.nodes.lines if isinstance(line.cells[-1], int)]
    assert sum(together) == sum(peaks)
    assert max(c.heat for row in ranks.rows for c in row.cells) == 8
    page, words, marks = render_html(document), render_terminal(document, 100), render_markdown(document)
    for text in (page, words):
        assert "No readable recording of ranks 3–5 and 17." in text
        assert f"Rank {ranks.rows[0].rank} peaks highest" in " ".join(text.split())
    assert f"| {ranks.rows[0].rank} |" in marks
    assert max(map(len, render_terminal(document, 60).split("\n"))) <= 60


def test_a_phase_that_is_alike_on_every_rank_names_none() -> None:
    shown = ranks_of(as_report(many_ranks(8)))
    assert shown is not None
    assert shown.phases is not None
    named = {(line.cells[1] == line.cells[4], line.cells[2], line.cells[5]) for line in shown.phases.lines}
    assert {who for alike, *both in named if alike for who in both} == {"all"}
    assert "all" not in {who for alike, *both in named if not alike for who in both}


def test_256_ranks_are_on_one_screen() -> None:
    """The eight fullest, and a digit for each rank's peak in the order of their numbers."""
    report = many_ranks(256, missing=(17,))
    lines = render_terminal(build_document(report), 80).split("\n")
    begin = next(i for i, line in enumerate(lines) if line.startswith("Peaks of all ranks in order"))
    digits = "".join(line[7:] for line in lines[begin + 1 : begin + 7])
    assert begin < 25
    assert (len(digits), digits[17], digits.count(".")) == (256, ".", 1)
    peaks = {r["rank"]: r["peak"]["active_bytes"] for r in report["ranks"]}
    assert digits[max(peaks, key=peaks.__getitem__)] == "8"
    assert digits[min(peaks, key=peaks.__getitem__)] == "1"
    page = render_html(build_document(report))
    assert page.index("The other 247 ranks") > page.index('<svg class="rank-picture"')


def test_one_process_alone_has_no_ranks_to_show() -> None:
    report, series = sample()
    assert ranks_of(as_report(report)) is None
    assert 'id="ranks"' not in render_html(build_document(report, series))


def test_hostile_names_show_as_text_and_nodes_can_be_hidden() -> None:
    ranks = summaries(1.0, 1.2)
    ranks[0]["node"], ranks[1]["node"] = HOSTILE[0], HOSTILE[1]
    ranks[0]["file"] = "/home/somebody/run/" + HOSTILE[0].replace("/", "")
    report = merged(rank_report(1, 2, node=HOSTILE[1]), ranks, 2, [])
    page = render_html(build_document(report))
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    hidden = redact(report)
    assert [r["node"] for r in hidden["ranks"]] == ["node-0", "node-1"]
    assert hidden["source"]["node"] == "node-1"
    assert {n["node"] for n in hidden["across_ranks"]["nodes"]} == {"node-0", "node-1"}
    assert "somebody" not in json.dumps(hidden)
