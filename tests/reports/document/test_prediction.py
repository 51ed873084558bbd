"""What a simulated run says of itself reaches every renderer, and what is not as documented reaches none."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from memprof.reports.document.build import reproduce_facts
from memprof.reports.document.prediction import needs_table
from memprof.reports.html.report import render_html
from msgspec import convert

from memprof.config.catalogue import find_config
from memprof.config.expected_error import comparisons, expected_error, stated_range
from memprof.config.fits import MARGIN, margin_of, stated_error, wide_margin
from memprof.config.gpus import find_gpu
from memprof.config.settings import Settings
from memprof.config.trl_arguments import assumed_of
from memprof.report.codec import to_builtins
from memprof.report.run import KnownSettings
from memprof.report.simulation import Assumed, ExpectedError
from memprof.snapshot.validation import read_run
from tests.report.files import validate
from tests.reports.document.drawn import render_markdown, render_terminal
from tests.reports.sample import sample
from tests.reports.typed import build_document, report_of

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


def _known(**settings: object) -> KnownSettings:
    return KnownSettings.of(settings)


def _parts() -> dict[str, Any]:
    need = {"phase": "backward", "allocated_bytes": 9 * GIB, "reserved_bytes": 10 * GIB, "needed_bytes": 11 * GIB}
    return {
        "expected_error": to_builtins(stated_error(_known(recipe="trl", generation="vllm"))),
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
                "members": 6,
                "failed": 2,
                "flushes": False,
                "lowest_bytes": 9 * GIB,
                "highest_bytes": 11 * GIB,
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
    notes: list[str] = []
    run = read_run(_parts(), notes)
    assert not notes
    for name, part in _parts().items():
        assert getattr(run, name) == convert(part, type(getattr(run, name)))


def test_every_renderer_says_them() -> None:
    document = build_document(_report())
    for rendered in (render_markdown(document), render_terminal(document, 100), render_html(document)):
        for words in (
            "does not fit", "Backward", "9.00", "11.00", "777", "888", "Half of them fit", "vLLM's pool", "variants",
        ):  # fmt: skip
            assert words in " ".join(rendered.split()), words
        assert "≈ 41.5 s" in rendered
        assert "fast" in rendered
        assert "A step" in rendered.replace("Time per step", "")
    assert "<b>Card" not in render_html(document)
    assert 'class="verdict bad">Does not fit' in render_html(document)
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
    assert document.report.expected_error is None
    assert "Expected error" not in render_markdown(document)


@pytest.mark.parametrize(
    "spoil", [{"phases": [{}]}, {"fits": "yes"}, {"total_bytes": None}, {"host": 3}, {"ensemble": 3}]
)
def test_what_is_not_as_documented_is_dropped(spoil: dict[str, Any]) -> None:
    notes: list[str] = []
    assert read_run({"fit": {**_parts()["fit"], **spoil}}, notes).fit is None
    assert read_run({"fit": 7}, notes).fit is None
    assert all(note.startswith("memprof key: 'fit' is not as documented (") for note in notes)
    assert len(notes) == 2


def _errors(kind: str, *what: str) -> list[float]:
    rows = [row for row in comparisons() if row.kind == kind and row.what in what]
    return [row.error for row in rows]


def test_the_expected_error_is_stated_of_the_class_of_the_run() -> None:
    program = expected_error(_known())
    low, high = stated_range(_errors("programs on GPUs", "reserved"))
    assert (program.reserved.low, program.reserved.high) == (round(low, 4), round(high, 4))
    assert program.not_compared == ()
    trained = [expected_error(_known(recipe=recipe, lora_r=8)) for recipe in ("trl", "lean")]
    kinds = ("TRL, LoRA, on an emulated GPU", "lean trainer on an emulated GPU")
    for found, kind in zip(trained, kinds, strict=True):
        assert [each.name for each in found.basis or ()] == [kind, program.name]
        assert found.name == kind
        assert all(f"{each.comparisons} " in found.sentence for each in found.basis or ())
        assert found.reserved.comparisons > program.reserved.comparisons
        assert found.sentence.startswith("If these settings are what runs: allocated ")
    assert expected_error(_known(recipe="trl", device="cpu")).allocated.high == 0.001


def test_a_run_with_a_part_that_was_never_compared_keeps_a_wider_margin(tmp_path: Path) -> None:
    assert margin_of(_known(recipe="trl", lora_r=8, load_in_4bit=True)) == MARGIN
    lacking = [1 / (1 + error) - 1 for error in _errors("programs on GPUs", "reserved", "peak")]
    assert MARGIN < max(lacking) <= wide_margin() < max(lacking) + 0.01
    for config in (
        {"recipe": "trl", "generation": "vllm"}, {"recipe": "trl", "padding": "worst"}, {"recipe": "liger"}, {},
        {"recipe": "trl", "trainer": "dpo", "lora_r": 8, "load_in_4bit": True},
    ):  # fmt: skip
        assert margin_of(_known(**config)) == wide_margin(), config
    assert margin_of(_known(recipe="trl", left_out=["torch_compile"])) > wide_margin()
    assert expected_error(_known(recipe="trl"), card=find_gpu("MI300X")).not_compared == ("AMD GPUs",)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**find_config("Qwen/Qwen3-8B"), "kv_lora_rank": 512, "qk_rope_head_dim": 64}))
    latent = _known(recipe="trl", model=str(config))
    assert (expected_error(latent).not_compared, margin_of(latent)) == (("latent attention",), wide_margin())
    for model in ("Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B"):
        assert margin_of(_known(recipe="trl", model=model)) == MARGIN


def test_what_nobody_gave_is_said_with_the_value_taken() -> None:
    given = {"model": "Qwen/Qwen2.5-0.5B-Instruct", "completion_length": 64}
    settings = Settings(**given, assumed=assumed_of(given))
    found = expected_error(settings.known)
    assert (found.assumed or ())[0] == Assumed(setting="prompt_length", value=512)
    assert "completion_length" not in [each.setting for each in found.assumed or ()]
    assert "Assumed, because nobody gave it: prompt_length 512," in found.sentence
    assert "Assumed" not in expected_error(Settings(**given).known).sentence
    longer = expected_error(settings.known, settings.with_(prompt_length=1024).known)
    assert "prompt_length" not in [each.setting for each in longer.assumed or ()]


def test_exact_runs_on_the_emulated_gpu_do_not_narrow_the_range_of_programs_on_gpus() -> None:
    program = expected_error(_known()).reserved
    for lora, four_bit in ((None, False), (8, False), (8, True)):
        found = expected_error(_known(recipe="trl", lora_r=lora, load_in_4bit=four_bit)).reserved
        assert found.low <= program.low
        assert found.high >= program.high


def test_a_range_is_wider_where_there_are_few_comparisons() -> None:
    assert stated_range([-0.1, 0.1] * 10) == (-0.1, 0.1)
    low, high = stated_range([-0.1, 0.1] * 5)
    assert (low, high) == (pytest.approx(-0.2), pytest.approx(0.2))
    assert stated_range([0.0, 0.0]) == (-0.001, 0.001)


def test_an_older_report_has_no_classes() -> None:
    report = _report()
    for name in ("class", "margin", "basis"):
        report["expected_error"].pop(name)
    validate(report)
    error = read_run({"expected_error": report["expected_error"]}, []).expected_error
    assert error == convert(report["expected_error"], ExpectedError)
    count = report["expected_error"]["allocated"]["comparisons"]
    assert f"{count} comparisons" in render_markdown(build_document(report))


def test_parts_that_were_never_compared_are_named() -> None:
    told = expected_error(_known(optim="paged_adamw_8bit", gpus=8, sharding="zero3", generation="vllm"))
    assert told.not_compared == ("optimizer paged_adamw_8bit", "vLLM's pool", "sharding zero3")


def test_cached_memory_is_not_said_to_be_what_a_phase_needs() -> None:
    report = _report()
    held = {"phase": "generate", "allocated_bytes": 4 * GIB, "reserved_bytes": 10 * GIB, "needed_bytes": 11 * GIB}
    report["fit"]["phases"].append({**held, "fits": False})
    document = build_document(report)
    needs = needs_table(document.report.fit)
    assert needs is not None
    assert ["cached" in str(line.cells[-1]) for line in needs.lines] == [False, True]
    for rendered in (render_markdown(document), render_terminal(document, 100), render_html(document)):
        assert "It fits only if cached memory is released." in rendered


def test_a_simulation_without_a_snapshot_is_made_again_from_its_json() -> None:
    report = _report()
    report["source"] |= {"files": [], "config": {"recipe": "trl", "model": "m"}}
    facts = {fact.label: fact.value for fact in reproduce_facts(report_of(report).source)}
    assert facts["Command"] == "memprof simulate --like memprof-report.json -o report.html"
    assert "Every allocation" not in facts
    report["source"]["files"] = ["sim.pickle"]
    facts = {fact.label: fact.value for fact in reproduce_facts(report_of(report).source)}
    assert facts["Command"] == "memprof report sim.pickle -o report.html"
