"""The document's figures, against the story the sample report was told from."""

from __future__ import annotations

import copy
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from memprof.reports.document.build import badge_of, document_of, growth_words, oom_sentence, reproduce_facts
from memprof.reports.document.model import Document, PublishedRow
from memprof.reports.document.page_title import subtitle_of
from memprof.reports.document.tables import (
    brief_stack,
    call_site,
    evidence_bytes,
    phase_table,
    shown_stack,
    site_words,
)

from memprof.units import GIB
from tests.report.plain import as_run, compare
from tests.reports.sample import MIB, PEAK, sample
from tests.reports.typed import build_comparison, build_document, report_of, rows_of


@pytest.fixture
def document() -> Document:
    return build_document(*sample())


def adds_up(document: Document) -> bool:
    return all(check.ok is not False for check in document.checks)


def row(document: Document, identifier: str) -> PublishedRow:
    return next(r for r in document.rows if r.id == identifier)


def test_rows_add_up_to_the_total_and_children_to_their_row(document: Document) -> None:
    groups = document.rows[:-1]
    assert document.rows[-1].id == "total"
    assert sum(r.at_peak for r in groups) == document.rows[-1].at_peak
    for group in groups:
        if group.children and group.id != "unattributed":
            assert sum(c.at_peak for c in group.children) == group.at_peak
        for category in group.children:
            if category.children:
                assert sum(d.at_peak for d in category.children) == category.at_peak


def test_own_peaks_need_not_fall_together(document: Document) -> None:
    cache = row(document, "kv_cache")
    assert (cache.at_peak, cache.own_peak) == (0, 480 * MIB)
    training = row(document, "training")
    assert training.own_peak is not None
    own = [c.own_peak or 0 for c in training.children]
    assert max(own) < training.own_peak < sum(own)


def test_a_groups_own_peak_is_unknown_rather_than_a_sum_of_peaks() -> None:
    report, series = sample()
    del report["group_own_peaks"]
    document = build_document(report, series)
    assert row(document, "training").own_peak is None
    assert row(document, "kv_cache").own_peak == 480 * MIB


def test_details_that_are_incomplete_say_so() -> None:
    report, series = sample()
    report["peak"]["details"]["activations"]["saved"] -= 100 * MIB
    activations = next(c for c in row(build_document(report, series), "training").children if c.id == "activations")
    assert [(d.label, d.at_peak // MIB) for d in activations.children] == [("saved", 1180), ("not broken down", 100)]


def test_phases_fold_repeats_and_show_the_worst(document: Document) -> None:
    phases = phase_table(document.report)
    assert phases is not None
    lines: dict[str, Any] = {line.cells[0].phase: line for line in phases.lines}  # type: ignore[union-attr]
    name, _, _, low, high, _ = lines["backward"].cells
    assert name.badges == ("×4", "peak")
    assert low < high == document.summary.peak_bytes
    assert [phase for phase, line in lines.items() if line.strong] == ["backward"]
    assert sum(int(line.cells[2].removesuffix("%")) for line in lines.values()) == pytest.approx(100, abs=3)
    assert all(sum(part.bytes for part in line.cells[5]) == line.cells[4] for line in lines.values())


def test_alike_allocations_are_one_line_and_lose_no_byte(document: Document) -> None:
    weights = document.allocations[0]
    assert (weights.count, weights.group.each_bytes) == (4, 700 * MIB)
    assert weights.name == "model.layers.*.mlp.up_proj.weight"
    assert weights.shape == "8960×1536 bfloat16"
    assert sum(a.bytes for a in document.allocations) == document.summary.peak_bytes
    assert sum(a.count for a in document.allocations) == len(document.report.peak.allocations)


def test_evidence_and_alternatives_in_words(document: Document) -> None:
    why = {a.category: a.why for a in document.allocations}
    assert why["activations"] == "rule model.forward matched its stack"
    assert "could also be temporaries" in why["activation_gradients"]
    assert why["unattributed"] == "nothing explains it"
    assert sum(n for _, n in evidence_bytes(document.report.peak)) == document.summary.peak_bytes


def test_icicle_keeps_every_byte_at_every_level(document: Document) -> None:
    assert document.icicle.bytes == sum(PEAK.values()) * MIB
    for category in document.icicle.children:
        assert sum(site.bytes for site in category.children) == category.bytes == PEAK[category.category] * MIB
        for site in category.children:
            assert not site.children or sum(leaf.bytes for leaf in site.children) == site.bytes
    assert sum(c.bytes for c in document.icicle.children) == document.icicle.bytes


def test_icicle_names_what_is_not_listed() -> None:
    report, series = sample()
    report["peak"]["allocations"] = report["peak"]["allocations"][:3]
    icicle = build_document(report, series).icicle
    rest = {c.category: c.children[-1] for c in icicle.children}
    assert rest["gradients"].label == "smaller allocations"
    assert sum(site.bytes for c in icicle.children for site in c.children) == icicle.bytes


def test_icicle_names_no_line_that_only_starts_a_command() -> None:
    report, series = sample()
    for group in report["peak"]["allocations"]:
        group["stack"] = ["/v/lib/python3.11/site-packages/click/core.py:911 invoke", "/v/bin/memprof:8 <module>"]
        group["name"] = "model.layers.0.mlp.up_proj.weight"
    boxes = {site.label for c in build_document(report, series).icicle.children for site in c.children}
    assert boxes <= {"model.layers.0", "smaller allocations"}
    assert site_words("", ()) == "no stack recorded"
    assert site_words("", ("/v/bin/memprof:8 <module>",)) == "no line of the program"


def test_everything_adds_up(document: Document) -> None:
    assert adds_up(document)
    labels = [c.label for c in document.checks if c.ok]
    assert labels == [
        "Sum of categories",
        "Sum of groups",
        "Sum of evidence",
        "Allocated + pending free",
        "Requested + rounding",
        "Active + cached + split + pools",
        "Segments that grew the device peak",
        "Phase peaks",
    ]


@pytest.mark.parametrize(
    ("spoil", "label"),
    [
        (lambda r: r["peak"]["categories"].update(weights=1), "Sum of categories"),
        (lambda r: r["peak"]["evidence"].update(owner=1), "Sum of evidence"),
        (lambda r: r["peak"].update(pending_free_bytes=512), "Allocated + pending free"),
        (lambda r: r["peak"].update(rounding_bytes=0), "Requested + rounding"),
        (lambda r: r["peak"].update(cached_bytes=0), "Active + cached + split + pools"),
        (lambda r: r["phases"][0].update(peak_bytes=1), "Phase peaks"),
        (lambda r: r["device_peak"]["grown_by"].pop(), "Segments that grew the device peak"),
    ],
)
def test_what_does_not_add_up_is_said(spoil: Any, label: str) -> None:
    report, series = sample()
    report = copy.deepcopy(report)
    spoil(report)
    checks = build_document(report, series).checks
    assert label in [c.label for c in checks if c.ok is False]


def test_pending_free_stands_between_allocated_and_active() -> None:
    document = build_document(*sample(pending_mib=64))
    assert adds_up(document)
    assert document.summary.peak_bytes == (sum(PEAK.values()) - 64) * MIB
    assert document.rows[-1].at_peak == sum(PEAK.values()) * MIB


def test_a_trace_has_no_device() -> None:
    document = build_document(*sample("trace"))
    assert document.report.device_peak.reserved_bytes is None
    assert document.summary.rest == ()
    assert document.summary.capacity_bytes is None
    assert "Headroom" not in {f.label for f in document.summary.facts}
    assert adds_up(document)


def test_a_simulation_is_badged() -> None:
    badges = [badge_of(build_document(*sample(kind)).report.source) for kind in ("simulated", "cuda")]
    assert badges == ["simulated", "measured"]


def test_oom_says_what_was_asked_and_whether_it_would_have_fitted() -> None:
    report, series = sample()
    report["oom"] = {
        "requested_bytes": 2 * GIB,
        "device_free_bytes": 1 * GIB,
        "phase": "backward",
        "step": 3,
        "stack": ["train.py:1 main"],
        "fits_defragmented": True,
        "cached_bytes": GIB,
        "inactive_split_bytes": GIB // 2,
    }
    oom = build_document(report, series).report.oom
    assert oom is not None
    assert oom_sentence(oom) == (
        "Out of memory in backward, step 3: 2.00 GiB were asked for, 1.00 GiB were free on the device. "
        "1.50 GiB lay free inside the allocator. Joined to it, the request would fit."
    )


def test_growth_across_steps_in_words() -> None:
    report, series = sample()
    steps = [{"step": i, "peak_bytes": 6 * GIB, "end_bytes": i * GIB, "tokens": 100} for i in (1, 2, 3)]
    report["growth"] = {
        "steps": steps,
        "end_bytes_per_step": float(GIB),
        "peak_bytes_per_token": 1.0,
        "explained_by_tokens": 0.25,
        "left_behind": [
            {"bytes": 2 * GIB, "bytes_per_step": float(GIB), "steps": 2, "category": "inputs", "stack": ["a.py:1 keep"]}
        ],
    }
    found = build_document(report, series).report.growth
    assert found is not None
    assert growth_words(found) == (
        "Memory left when a step ends changes by +1.00 GiB a step; "
        "the number of tokens explains 25% of the difference between peaks."
    )
    assert call_site(found.left_behind[0].stack) == "a.py:1 keep"


def test_a_run_without_anything_is_still_a_document() -> None:
    report, series = sample()
    peak = report["peak"]
    for name, value in peak.items():
        if name.endswith("_bytes"):
            peak[name] = 0
        elif isinstance(value, dict):
            peak[name] = {} if name == "details" else dict.fromkeys(value, 0)
    peak["allocations"] = []
    report |= {"phases": [], "own_peaks": dict.fromkeys(report["own_peaks"], 0), "group_own_peaks": {}}
    report["device_peak"] |= {"reserved_bytes": 0, "grown_by": []}
    document = build_document(report, {**series, "time_us": []})
    assert document.headline.cause == "Nothing was allocated."
    assert (document.timeline, phase_table(document.report), document.allocations) == (None, None, ())
    assert adds_up(document)


def test_call_site_is_the_first_frame_a_reader_can_act_on() -> None:
    site = "/v/lib/python3.11/site-packages"
    model = f"{site}/transformers/models/llama/modeling_llama.py:215 forward"
    assert call_site([f"{site}/torch/nn/modules/linear.py:134 forward", model]) == "llama/modeling_llama.py:215 forward"
    assert call_site(["??:0 at::native::add", "/usr/lib/python3.11/threading.py:1 run", "/w/a/train.py:3 step"]) == (
        "a/train.py:3 step"
    )
    assert call_site([f"{site}/torch/autograd/graph.py:1 f"]) == "autograd/graph.py:1 f"
    assert call_site(["C:\\work\\my run\\train.py:3 step"]) == "my run/train.py:3 step"
    assert call_site([]) == ""


def test_native_frames_are_folded_and_python_ones_never() -> None:
    native = [f"??:0 at::native::f{i}" for i in range(5)] + ["/b/Context.cpp:12 c10::g"]
    stack = [*native, "/w/train.py:3 step", "ceval.c:1 eval", "<string>:1 <module>"]
    assert shown_stack(stack) == (
        "??:0 at::native::f0",
        "… 5 more C++ frames",
        "/w/train.py:3 step",
        "ceval.c:1 eval",
        "<string>:1 <module>",
    )


def test_a_phase_nobody_knows_is_not_called_other() -> None:
    report, series = sample()
    report["source"] |= {"phases_known_by": "none", "history": "none"}
    report["peak"]["phase"] = "other"
    document = build_document(report, series)
    assert document.summary.where.startswith("an unknown phase")
    assert subtitle_of(document.report)[-1] == "no history: the allocator's state only"


def test_the_lives_of_a_simulated_run_count_events() -> None:
    """Its clock counts events; beside phases with estimated times, microseconds would be believed."""
    report, series = sample("simulated")
    rows = build_document(report, series).allocations
    ended = [row.lifetime for row in rows if all(died is not None for _, died in row.lives)]
    assert any("event" in words for words in ended)
    assert all(re.fullmatch(r"[\d,]+( to [\d,]+)? events?|from before recording", words) for words in ended)


def test_single_allocations_keep_order_and_are_not_folded() -> None:
    listed = sample()[0]["peak"]["allocations"]
    rows = rows_of(listed, sum(a["bytes"] for a in listed))
    assert [r.group.each_bytes for r in rows] == [a["bytes"] for a in listed]
    assert {r.count for r in rows} == {1}


@pytest.mark.parametrize(
    "name",
    [
        "cs336-medium-train-ctx256-t211",
        "flexgen-opt-oom-t20",
        "cs336-state-only-51g-t26",
        "sd-guidance-legacy-list-t22",
    ],
)
def test_real_snapshots_become_documents_that_add_up(shared: Path, name: str) -> None:
    from memprof.analysis.analysis import analyze

    analysis = analyze(shared / "snapshots" / f"{name}.pickle")
    document = document_of(analysis)
    assert adds_up(document), [c for c in document.checks if c.ok is False]
    assert document.summary.peak_bytes == analysis.peak.allocated_bytes
    assert sum(c.bytes for c in document.icicle.children) == document.icicle.bytes
    if document.timeline:
        assert max(document.timeline.total) >= document.summary.peak_bytes


def test_a_brief_stack_has_what_a_person_looks_for_and_says_what_is_left_out() -> None:
    stack = [
        "??:0 torch::unwind::unwind()",
        "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py:134 forward",
        "??:0 _PyEval_EvalFrameDefault",
        "/opt/venv/lib/python3.11/site-packages/trl/trainer/grpo_trainer.py:1790 _compute_loss",
        "/home/ada/train.py:31 main",
        "/opt/venv/lib/python3.11/site-packages/memprof/instrument/script.py:80 run_script",
        "/opt/venv/lib/python3.11/site-packages/click/core.py:1443 invoke",
        "/usr/lib/python3.11/threading.py:975 _bootstrap",
        "<frozen runpy>:198 _run_module_as_main",
    ]
    assert brief_stack(stack) == (
        "trl/trainer/grpo_trainer.py:1790 _compute_loss",
        "/home/ada/train.py:31 main",
        "… 7 more of torch, C++, Python, click and memprof (--full-stacks)",
    )
    assert brief_stack(stack[3:5]) == ("trl/trainer/grpo_trainer.py:1790 _compute_loss", "/home/ada/train.py:31 main")
    assert brief_stack(stack[:1]) == shown_stack(stack[:1])
    assert brief_stack(stack[:3]) == (
        "torch/nn/modules/linear.py:134 forward", "… 2 more of torch, C++, Python, click and memprof (--full-stacks)"
    )  # fmt: skip


@pytest.mark.parametrize("name", ["it's.pickle", "two words.pickle", "a$HOME;b.pickle", "~x.pickle", "plain-1.pickle"])
def test_commands_to_paste_name_the_file_for_a_shell(name: str) -> None:
    report, _ = sample()
    report["source"]["files"] = [f"/runs/{name}"]
    facts = reproduce_facts(report_of(report).source)
    commands = [shlex.split(fact.value) for fact in facts if fact.label in ("Command", "Every allocation")]
    assert [words[2] for words in commands] == [name, name]
    data = compare([as_run("a", "measured", report), as_run("b", "measured", report)])
    assert shlex.split(build_comparison(data).reproduce[0].value)[2:4] == [name, name]


def test_notes_are_sentences_that_spell_names_as_they_are() -> None:
    report, series = sample()[:2]
    report["notes"] = ["stacks were not recorded", "flexgen-oom.pickle has no rank", "steps=2 was not reached."]
    assert build_document(report, series).notes == (
        "Stacks were not recorded.",
        "flexgen-oom.pickle has no rank.",
        "steps=2 was not reached.",
    )
