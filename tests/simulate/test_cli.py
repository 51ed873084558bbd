"""The commands, from the outside: what they print, where, and how they end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.report.files import validate

SMALL = [
    "--num-generations",
    "4",
    "--per-device-train-batch-size",
    "4",
    "--prompt-length",
    "9",
    "--completion-length",
    "12",
]


def _invoke(*arguments: str) -> Any:
    from memprof.cli import main

    return CliRunner().invoke(main, list(arguments))


def test_a_simulation_fits_or_not(tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "sim.pickle"
    roomy = _invoke("simulate", "--model", tiny, *SMALL, "--gpu", "24GB", "-o", str(out), "--json", "-")
    assert roomy.exit_code == 0, roomy.output
    report = json.loads(roomy.stdout)
    assert report["schema"] == "memprof.report/1"
    assert report["source"]["kind"] == "simulated"
    assert report["fit"]["fits"] is True
    assert report["fit"]["sentence"].startswith("Fits: needs ")
    assert report["fit"]["needed_bytes"] == max(need["needed_bytes"] for need in report["fit"]["phases"])
    assert "Fits:" in roomy.stderr
    again = _invoke("report", str(out), "--json", "-")
    assert json.loads(again.stdout)["peak"]["active_bytes"] == report["peak"]["active_bytes"]
    assert json.loads(again.stdout)["fit"] == report["fit"]
    validate(report)

    tight = _invoke("simulate", "--model", tiny, *SMALL, "--gpu", "600MiB", "--format", "json")
    assert tight.exit_code == 4
    assert "Does not fit:" in tight.stderr

    config = tmp_path / "run.json"
    config.write_text(json.dumps({"model": tiny, "gpu": "600MiB"}))
    assert _invoke("simulate", "--config", str(config), *SMALL, "--format", "json").exit_code == 4


def test_mistakes_are_one_sentence() -> None:
    for arguments, code, words in (
        (["simulate"], 2, "which model?"),
        (["simulate", "--model", "no/such"], 3, "not in the catalogue"),
        (["simulate", "--model", "Qwen/Qwen3-8B", "--load-in-4bit"], 2, "needs an adapter"),
        (["simulate", "--model", "Qwen/Qwen3-8B", "--gpu", "huge"], 2, "give its memory, such as 24GB"),
        (["simulate", "--model", "Qwen/Qwen3-8B", "--workers", "2"], 2, "--workers 2 shares out several simulations"),
        (["simulate", "--script", "x.py", "--completion-lengths", "9", "--workers", "2"], 2, "runs in this process"),
        (["plan", "--model", "Qwen/Qwen3-8B", "--gpu", "huge"], 2, "give its memory, such as 24GB"),
        (["plan", "--model", "Qwen/Qwen3-8B", "--gpu", "24GB", "--vary", "x"], 2, "write it like"),
    ):
        done = _invoke(*arguments)
        assert done.exit_code == code, arguments
        assert words in done.stderr
        assert "Traceback" not in done.output


def test_a_plan_is_a_table_and_is_quick_the_second_time(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMPROF_CACHE", str(tmp_path))
    arguments = [
        "plan",
        "--model",
        tiny,
        *SMALL,
        "--gpu",
        "24GB",
        "--no-search",
        "--workers",
        "1",
        "--generation",
        "none",
    ]
    arguments += ["--recipe", "lean", "--dtype", "bfloat16", "--vary", "completion_length=12,24", "--json", "-"]
    first = _invoke(*arguments)
    assert first.exit_code == 0, first.output
    assert "LeanGRPOTrainer" not in capfd.readouterr().err  # what a worker says, not the command
    plan = json.loads(first.stdout)
    assert plan["schema"] == "memprof.plan/1"
    assert [row["method"] for row in plan["rows"]] == ["completion_length=12", "completion_length=24"]
    assert plan["rows"][0]["peak_bytes"] < plan["rows"][1]["peak_bytes"]
    assert len(list(tmp_path.glob("*.json"))) == 2
    for file in tmp_path.glob("*.json"):  # the second answer comes from these files, and nowhere else
        row = json.loads(file.read_text())
        file.write_text(json.dumps({**row, "host_bytes": 77}))
    second = json.loads(_invoke(*arguments).stdout)
    assert [row["host_bytes"] for row in second["rows"]] == [77, 77]
