"""What a simulated run says of itself reaches every renderer, and what is not as documented reaches none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from memprof.reports.document.build import build_document
from memprof.reports.html.report import render_html
from memprof.reports.json import validate
from memprof.reports.markdown.report import render_markdown
from memprof.reports.terminal.report import render_terminal

from memprof.analysis.prediction import PARTS, usable
from memprof.config.expected_error import comparisons, expected_error
from tests.reports.sample import sample

GIB = 2**30


def _point(length: int, name: str, fits: bool, executed: bool) -> dict[str, Any]:
    return {
        "length": length,
        "share_below": 0.5,
        "peak_bytes": length * 2**20,
        "needed_bytes": length * 2**21,
        "fits": fits,
        "executed": executed,
        "names": [name],
    }


def _parts() -> dict[str, Any]:
    need = {"phase": "backward", "allocated_bytes": 9 * GIB, "reserved_bytes": 10 * GIB, "needed_bytes": 11 * GIB}
    return {
        "expected_error": expected_error({"load_in_4bit": True}),
        "estimated_time": {
            "step_s": 41.5,
            "phases": {"generate": 40.0, "backward": 1.5},
            "basis": "roofline",
            "assumptions": ["<i>fast</i>"],
        },
        "fit": {
            "gpu": "<b>Card</b>",
            "total_bytes": 10 * GIB,
            "limit_bytes": int(10 * GIB / 1.03),
            "needed_bytes": 11 * GIB,
            "reserved_bytes": 10 * GIB,
            "non_torch_bytes": GIB,
            "headroom_bytes": -GIB,
            "margin": 0.03,
            "fits": False,
            "flushes": False,
            "phase": "backward",
            "phases": [{**need, "fits": False}],
            "host": None,
            "ensemble": {
                "members": 6, "failed": 2, "flushes": False, "lowest_bytes": 9 * GIB, "highest_bytes": 11 * GIB,
            },
            "sentence": "Does not fit: needs 11.00 GiB <i>.",
        },
        "lengths": {
            "source": "given",
            "count": 3,
            "batch": 4,
            "mean": 20.5,
            "points": [_point(777, "p50", True, True), _point(888, "p95", False, False)],
            "worst_case": _point(999, "worst case", False, True),
            "largest_fitting": 777,
            "share_of_steps_fitting": 0.5,
            "sentence": "Half of them fit.",
        },
    }


def _report() -> dict[str, Any]:
    return {**copy.deepcopy(sample("simulated")[0]), **_parts()}


def test_the_schema_holds_them() -> None:
    validate(_report())
    for name in PARTS:
        assert usable(name, _parts()[name]) == _parts()[name]


def test_every_renderer_says_them() -> None:
    document = build_document(_report())
    for rendered in (render_markdown(document), render_terminal(document, 100), render_html(document)):
        for words in (
            "does not fit", "Backward", "9.00", "11.00", "777", "888", "Half of them fit", "4-bit layers", "variants",
        ):  # fmt: skip
            assert words in " ".join(rendered.split()), words
        assert "≈ 41.5 s" in rendered
        assert "fast" in rendered
        assert "A step" in rendered.replace("A step takes", "")
    assert "<b>Card" not in render_html(document)
    assert '<dd class="value">does not fit</dd>' in render_html(document)
    assert "<i>fast" not in render_html(document)
    narrow = render_terminal(document, 60)
    assert max(map(len, narrow.splitlines())) <= 60


def test_the_hosts_share_is_said() -> None:
    report = _report()
    report["fit"]["host"] = {"needed_bytes": 7 * GIB, "total_bytes": 5 * GIB, "fits": False}
    validate(report)
    assert "Host needs: **7.00 GiB** (of 5.00; does not fit)" in render_markdown(build_document(report))


def test_a_recorded_run_says_nothing_of_the_kind() -> None:
    document = build_document(sample()[0])
    assert document.prediction is None
    assert "Expected error" not in render_markdown(document)


@pytest.mark.parametrize(
    "spoil", [{"phases": [{}]}, {"fits": "yes"}, {"total_bytes": None}, {"host": 3}, {"ensemble": 3}]
)
def test_what_is_not_as_documented_is_dropped(spoil: dict[str, Any]) -> None:
    assert usable("fit", {**_parts()["fit"], **spoil}) is None
    assert usable("fit", 7) is None


def test_the_expected_error_is_the_range_of_the_comparisons() -> None:
    errors = [r["simulated_bytes"] / r["measured_bytes"] - 1 for r in comparisons() if r["what"] == "reserved"]
    found = expected_error({})
    assert found["reserved"]["low"] == pytest.approx(min(errors), abs=1e-6)
    assert found["reserved"]["high"] == pytest.approx(max(errors), abs=1e-6)
    assert found["not_compared"] == []
    told = expected_error({"optim": "paged_adamw_8bit", "gpus": 8, "sharding": "zero3", "generation": "vllm"})
    assert told["not_compared"] == ["optimizer paged_adamw_8bit", "vLLM's pool", "sharding zero3"]
