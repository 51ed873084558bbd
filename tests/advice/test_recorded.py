"""A real TRL run, recorded by the callback; simulated from that recording alone; and what advice says comes true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.trl, pytest.mark.slow, pytest.mark.usefixtures("only_new_tensors")]

RUN = {"max_completion_length": 90, "generation_kwargs": {"min_new_tokens": 90}}


def _trained(folder: Path, **settings: Any) -> dict[str, Any]:
    """The report of a run's second step."""
    import torch

    from memprof import MemProfCallback, analyze
    from tests.integrations.runs import checkpoint, grpo

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = folder / f"run-{len(list(folder.iterdir()))}"
    watch = MemProfCallback(output_dir=out / "watched", steps=[2], report=False)
    try:
        grpo(checkpoint(folder), out, [watch], **{**RUN, **settings}).train()
    finally:
        torch.set_num_threads(threads)
    return analyze(next((out / "watched").glob("*.pickle"))).to_dict()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    for package in ("torch", "transformers", "trl", "peft"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("recorded")
    return folder, _trained(folder)


def _peak(settings: Any) -> int:
    from memprof.simulate.evaluate import evaluate

    return int(evaluate(settings, None, stacks=False).analysis.peak.allocated_bytes)


def test_advice_comes_true(recorded: tuple[Path, dict[str, Any]]) -> None:
    from memprof.advice.candidates import candidates_for
    from memprof.config.from_recording import place_model, settings_like
    from tests.report.plain import run_of

    folder, report = recorded
    likeness = settings_like(report["source"])
    settings = place_model(likeness, folder / "models")
    unchanged = _peak(settings)
    measured = report["peak"]["allocated_bytes"]
    assert unchanged == pytest.approx(measured, abs=256)  # a few scalars of this process are not the run's
    candidate = next(c for c in candidates_for(run_of(report)) if c.id == "micro_batch_2")
    predicted = unchanged - _peak(settings.with_(**candidate.changes))
    saved = measured - _trained(folder, **candidate.changes)["peak"]["allocated_bytes"]
    assert saved > 0.05 * measured
    assert predicted == pytest.approx(saved, rel=0.02)


def test_a_recording_says_what_ran(recorded: tuple[Path, dict[str, Any]]) -> None:
    _, report = recorded
    setup = report["source"]["setup"]
    assert setup["model_config"]["model_type"] == "qwen2"
    assert not any("/" in str(value) for value in setup["model_config"].values())
    assert setup["dtypes"] == {"float32": report["source"]["config"]["parameters"]}
    longest = max(prompt for _, prompt, _ in setup["lengths"])
    assert setup["batches"] == [[2, 4, longest, 90]]
    assert [completion for _, _, completion in setup["lengths"]] == [90] * 4
    assert report["advice"]
    assert {entry["basis"] for entry in report["advice"]} == {"estimated"}


def test_the_command_puts_measured_and_simulated_side_by_side(
    recorded: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from memprof.cli import main
    from tests.report.files import validate
    from tests.reports.typed import build_comparison

    folder, report = recorded
    monkeypatch.setenv("MEMPROF_CACHE", str(folder / "cache"))
    source = folder / "report.json"
    source.write_text(json.dumps(report))
    page = folder / "what-if.html"
    arguments = ["simulate", "--like", str(source), "--set", "max_completion_length=40", "-o", str(page), "--json", "-"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert [run["badge"] for run in answer["runs"]] == ["measured", "simulated", "simulated"]
    assert answer["runs"][2]["label"] == "with completion_length=40"
    total = next(row for row in answer["rows"] if row["id"] == "total")["at_peak"]
    assert total[1] == pytest.approx(total[0], abs=256)
    assert total[2] < total[1]
    validate(answer)
    assert answer["unchanged"]["measured_bytes"] == report["peak"]["allocated_bytes"]
    first = build_comparison(answer).unchanged
    assert first.startswith("The simulator's error on the unchanged run: ")
    assert "0.00% of the allocated peak" in first
    text = page.read_text(encoding="utf-8")
    assert text.index("error on the unchanged run") < text.index('class="card"')
