"""``memprof report --advise``: simulated advice in the table, the JSON and the page. The simulating is in test_cli."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from memprof.report import Report
from memprof.report.codec import from_builtins, to_builtins
from tests.report.files import validate
from tests.synthetic import SnapshotBuilder

MIB = 2**20
ENTRY = {
    "id": "micro_batch_1", "action": "Train 1 completion at a time instead of 8", "setting": "per_device=<1>",
    "saves_bytes": 3 * MIB, "costs": "Eight passes.", "exact": True, "toll": 1, "basis": "simulated",
    "peak": "allocated", "peak_after_bytes": 2 * MIB,
}  # fmt: skip
PARTS = {
    "advice": [ENTRY], "notes": ["Simulating this run: /home/ada/x.py is assumed."],
    "unchanged": {"measured_bytes": 5 * MIB, "simulated_bytes": 5 * MIB, "assumed": []},
}  # fmt: skip
TOGETHER = {
    "gpu": "1GB", "total_bytes": 10**9, "fits": False, "before_bytes": 60 * MIB, "after_bytes": 9 * MIB,
    "shift_bytes": 0, "margin": 0.03, "phase": "forward", "changes": [], "settings": {}, "sentence": "Nothing fits.",
}  # fmt: skip


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    run = SnapshotBuilder()
    run.alloc(2 * MIB, "from_pretrained", "main")
    run.alloc(3 * MIB, "main")
    return run.save(tmp_path / "run.pickle")


def _invoke(*arguments: object) -> Any:
    from memprof.cli import main

    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the simulating was asked, which is not done here."""
    for package in ("torch", "transformers", "trl", "peft"):
        pytest.importorskip(package)
    calls: list[dict[str, Any]] = []

    def simulated(report: Report, *_: Any, **how: Any) -> Report:
        calls.append(how)
        parts = {**PARTS, "combination": TOGETHER} if how["gpu"] else PARTS
        return from_builtins({**to_builtins(report), **parts}, Report)

    monkeypatch.setattr("memprof.advice.simulated_advice.with_simulated_advice", simulated)
    return calls


def test_table_json_and_page_have_the_simulated_advice(
    snapshot: Path, tmp_path: Path, asked: list[dict[str, Any]]
) -> None:
    data, page = tmp_path / "run.json", tmp_path / "run.html"
    done = _invoke("report", snapshot, "--advise", "--seconds", "7", "--redact", "--json", data, "-o", page)
    assert done.exit_code == 0, done.output
    assert [(a["gpu"], a["seconds"]) for a in asked] == [(None, 7.0)]
    assert "Does it add up? Yes" in done.stdout
    assert "Train 1 completion at a time instead of 8 (simulated, same gradients)" in done.stdout
    assert "per_device=<1>" in done.stdout
    assert done.stdout.count("Try first") == 1
    report = json.loads(data.read_text())
    validate(report)
    assert report["advice"] == [ENTRY]
    assert "ada" not in json.dumps(report["notes"])
    shown = page.read_text(encoding="utf-8")
    assert "per_device=&lt;1&gt;" in shown
    assert "found by simulating the changed run" in shown
    assert "/home/ada" not in shown


@pytest.mark.parametrize("style", ["json", "markdown"])
def test_other_formats_have_it_once(snapshot: Path, asked: list[dict[str, Any]], style: str) -> None:
    done = _invoke("report", snapshot, "--advise", "--format", style)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("Train 1 completion at a time") == 1
    if style == "json":
        validate(json.loads(done.stdout))


def test_what_fits_in_no_way_ends_with_4_after_all_is_written(
    snapshot: Path, tmp_path: Path, asked: list[dict[str, Any]]
) -> None:
    page = tmp_path / "run.html"
    done = _invoke("report", snapshot, "--advise", "--gpu", "1GB", "-o", page)
    assert done.exit_code == 4
    assert asked[0]["gpu"] == "1GB"
    assert "Nothing fits." in done.stdout
    assert "Nothing fits." in page.read_text(encoding="utf-8")


def test_a_run_that_cannot_be_simulated_keeps_its_estimates_and_says_why(snapshot: Path) -> None:
    for package in ("torch", "transformers", "trl", "peft"):
        pytest.importorskip(package)
    done = _invoke("report", snapshot, "--advise", "--json", "-")
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    validate(report)
    assert report["notes"][0].endswith("savings are estimates.")
    asked = _invoke("report", snapshot, "--advise", "--gpu", "24GB")
    assert asked.exit_code == 0
    assert "not simulated" in " ".join(asked.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "24GB"], "requires --advise"),
        (["--seconds", "5"], "add --advise"),
        (["--advise", "--gpu", "huge"], "give its memory, such as 24GB"),
    ],
)
def test_mistakes_are_one_sentence(snapshot: Path, arguments: list[str], words: str) -> None:
    done = _invoke("report", snapshot, *arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert not done.stdout


def test_without_trl_it_says_so_before_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "trl" else found(name, *a))
    done = _invoke("report", "absent.pickle", "--advise")
    assert done.exit_code == 2
    assert "--advise simulates: simulating needs trl: pip install '.[trl]' in a checkout" in done.stderr
    assert "Without --advise a report has estimates." in done.stderr
