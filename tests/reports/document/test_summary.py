"""The first screen's figures, against the story the sample report was told from."""

from __future__ import annotations

import dataclasses

import pytest
from memprof.reports.document.model import Document
from memprof.reports.document.prediction import reserving
from memprof.reports.document.summary import summary_of
from msgspec.structs import replace

from memprof.report.simulation import Fit, GenerationNeed
from memprof.units import GIB
from memprof.vocabulary import Evidence, Phase
from tests.report.plain import headline_of
from tests.reports.sample import MIB, PEAK, sample
from tests.reports.typed import build_document, report_of, typed


@pytest.fixture
def document() -> Document:
    return build_document(*sample())


def test_summary_says_the_peak_where_and_why(document: Document) -> None:
    summary = document.summary
    assert summary.peak_bytes == sum(PEAK.values()) * MIB
    assert summary.where == "backward, step 2"
    assert summary.capacity_bytes == 25_386_352_640
    assert {p.id: p.bytes for p in summary.bar} == {c: n * MIB for c, n in PEAK.items()}
    cause = document.headline.cause
    assert cause.startswith("2.73 GiB of weights (40% of the peak) and 2.38 GiB of loss logits (35%), ")
    assert " of the loss logits in " in cause
    assert cause.endswith(" (chunked_logprob.py:88). Inferred: loss logits.")


def test_the_first_sentence_writes_small_sizes_in_small_units() -> None:
    report = sample()[0]
    report["peak"] |= {"categories": {"weights": 17 * MIB, "activations": 6 * 2**10}, "active_bytes": 17 * MIB}
    assert headline_of(report)["cause"].startswith("17.0 MiB of weights (100% of the peak)")


def test_what_is_guessed_names_no_answer_of_a_few_bytes() -> None:
    report, series = sample()
    report["peak"]["guessed"] = {"inputs": 1000 * MIB}
    rows = build_document(report, series).allocations
    group = replace(rows[0].group, evidence=Evidence.LIFETIME, bytes=999 * MIB, alternatives=("temporaries",))
    guess = dataclasses.replace(rows[0], group=group)
    little = dataclasses.replace(guess, group=replace(group, bytes=MIB, alternatives=("inputs",)))
    found = summary_of(report_of(report), [guess, little]).guessed
    assert found is not None
    assert found.note == "could be temporaries"


def test_the_bar_fills_the_device_exactly(document: Document) -> None:
    summary = document.summary
    assert sum(p.bytes for p in (*summary.bar, *summary.rest)) == summary.capacity_bytes == summary.scale_bytes


def test_headroom_is_what_the_device_peak_leaves(document: Document) -> None:
    facts = {f.label: f.bytes for f in document.summary.facts}
    peak = document.report.device_peak
    assert facts["Headroom"] == 25_386_352_640 - (peak.reserved_bytes or 0) - (peak.non_torch_bytes or 0)
    assert facts["Generation's peak"] == (4 * 700 + 36 + 32 + 5 + 72 + 12 * 40 + 3) * MIB
    assert facts["Unattributed"] == 5 * MIB


def test_more_reserved_than_the_device_has_is_said() -> None:
    report, series = sample()
    report["source"]["device_total_bytes"] = 4 * GIB
    document = build_document(report, series)
    headroom = next(f for f in document.summary.facts if f.label == "Headroom")
    assert headroom.note == "more than the device has"
    assert (headroom.bytes or 0) < 0


@pytest.mark.parametrize(
    ("flushes", "words"),
    [(0, "nothing has to be given back"), (1, "cached memory is given back once to go on"),
     (24, "cached memory is given back 24 times to go on")],
)  # fmt: skip
def test_generation_says_what_it_reserves_and_what_is_given_back(flushes: int, words: str) -> None:
    told = {"held_bytes": 2**30, "reserved_bytes": 3 * 2**30, "flushes": flushes, "expandable": False}
    fit = Fit(
        gpu="24GB", total_bytes=1, limit_bytes=1, needed_bytes=1, reserved_bytes=1, non_torch_bytes=0,
        headroom_bytes=0, margin=0.0, fits=True, flushes=False, phase=Phase.GENERATE, phases=(), sentence="",
        generation=typed(told, GenerationNeed),
    )  # fmt: skip
    assert reserving(fit) == f"; reserves 3.00, {words}"
    assert not reserving(None)


def test_a_tensor_trace_says_what_every_phase_holds() -> None:
    report, _ = sample()
    report["peak"]["reserved_bytes"] = report["device_peak"]["reserved_bytes"] = None
    lowest = summary_of(report_of(report)).facts[0]
    assert (lowest.label, lowest.bytes) == ("Lowest phase peak", min(p["peak_bytes"] for p in report["phases"]))


def test_other_devices_are_named_and_the_one_shown_is_not() -> None:
    report, _ = sample()
    of_one = {"categories": {"weights": 3 * MIB}, "phase": "forward", "step": 1, "time_us": 1, "active_bytes": 3 * MIB}
    of_one |= {"reserved_bytes": None}
    report["devices"] = [
        {
            "device": n, "shown": n == 0, "device_peak_bytes": None,
            "peak": of_one | {"allocated_bytes": (5 - 2 * n) * MIB},
        }
        for n in (0, 1)
    ]
    facts = {f.label: f.bytes for f in summary_of(report_of(report)).facts}
    assert (facts["Device 1"], facts["All 2 devices"], "Device 0" in facts) == (3 * MIB, 8 * MIB, False)
