"""``memprof advise`` from the outside."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from memprof.config.settings import Settings
from memprof.report.advice import Combination
from memprof.report.codec import from_builtins
from tests.advice.reports import GIB, report
from tests.report.files import validate

FULL = Settings(model="m", gradient_checkpointing=False, prompt_length=256, completion_length=768)
HELD = {"forward": {"weights": 6 * GIB, "optimizer_state": 12 * GIB, "activations": 40 * GIB}}


def _invoke(*arguments: str) -> Any:
    from memprof.cli import main

    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def known(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(report(HELD, FULL)))
    return path


def test_estimates_at_once(known: Path) -> None:
    done = _invoke("advise", str(known), "--estimate")
    assert done.exit_code == 0, done.output
    assert "Turn gradient checkpointing on (estimated, same gradients)" in done.stdout
    assert "gradient_checkpointing=True" in done.stdout
    assert "Try first: " in done.stdout
    data = json.loads(_invoke("advise", str(known), "--estimate", "--json", "-").stdout)
    validate(data)
    assert {entry["basis"] for entry in data["advice"]} == {"estimated"}
    table = _invoke("advise", str(known), "--estimate", "--format", "markdown").stdout
    assert "| Saves, GiB | Basis |" in table


def test_a_folder_is_its_highest_recording(known: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "_memprof"
    folder.mkdir(parents=True)
    (folder / "step-000002.rank-0.json").write_text(known.read_text())
    higher = {"forward": {**HELD["forward"], "activations": 50 * GIB}}
    (folder / "step-000009.rank-0.json").write_text(json.dumps(report(higher, FULL)))
    (folder / "other.json").write_text("{}")
    data = json.loads(_invoke("advise", str(tmp_path / "out"), "--estimate", "--json", "-").stdout)
    assert data["peak"]["allocated_bytes"] == 68 * GIB


def test_mistakes_are_one_sentence(known: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "else.json").write_text('{"schema": "memprof.plan/1"}')
    stranger = tmp_path / "stranger.json"
    stranger.write_text(json.dumps(report(HELD, None, kind="cuda")))
    for arguments, code, words in (
        (["advise", str(tmp_path / "none.pickle")], 3, "none.pickle"),
        (["advise", str(tmp_path / "empty")], 3, "no snapshot"),
        (["advise", str(tmp_path / "else.json")], 3, "not a report that memprof understands"),
        (["advise", str(known), "--gpu", "huge"], 2, "give its memory, such as 24GB"),
        (["simulate", "--set", "beta=0"], 2, "name it with --like"),
        (["simulate", "--like", str(known), "--set", "completion_lenght=3"], 2, "did you mean completion_length"),
        (["simulate", "--like", str(stranger)], 3, "cannot be simulated"),
    ):
        done = _invoke(*arguments)
        assert done.exit_code == code, (arguments, done.output)
        assert words in done.stderr
        assert "Traceback" not in done.output


def test_what_cannot_be_simulated_is_estimated_and_said_so(tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.json"
    stranger.write_text(json.dumps(report(HELD, None, kind="cuda")))
    done = _invoke("advise", str(stranger))
    assert done.exit_code == 0
    assert "savings are estimates" in " ".join(done.stdout.split())


@pytest.mark.parametrize(("gpu", "code"), [("160GiB", 0), ("42GiB", 0), ("10GiB", 4)])
def test_a_card_for_a_run_that_cannot_be_simulated_is_answered_by_estimates(
    tmp_path: Path, gpu: str, code: int
) -> None:
    """64 GiB are held, 7 GiB of gaps lie between; each set is checked by adding up."""
    stranger = tmp_path / "stranger.json"
    held = {"weights": 6 * GIB, "gradients": 6 * GIB, "optimizer_state": 12 * GIB, "activations": 40 * GIB}
    data = report({"backward": held, "optimizer_step": {"weights": GIB}}, None, kind="cuda", reserved_bytes=71 * GIB)
    data["device_peak"] |= {"reserved_bytes": 71 * GIB, "non_torch_bytes": GIB}
    stranger.write_text(json.dumps(data))
    done = _invoke("advise", str(stranger), "--gpu", gpu, "--json", "-")
    assert done.exit_code == code, done.output
    answer = json.loads(done.stdout)
    validate(answer)
    together = answer["combination"]
    assert together["basis"] == "estimated"
    assert "not simulated" in together["sentence"]
    assert together["before_bytes"] == 72 * GIB
    assert together["fits"] == (together["after_bytes"] * 1.1 <= together["total_bytes"]) == (code == 0)
    assert bool(together["changes"]) == (gpu != "160GiB")


def test_an_estimated_fit_says_what_was_not_seen_and_counts_the_request_that_failed(tmp_path: Path) -> None:
    data = report({"load": {"weights": 11 * GIB}}, None, kind="cuda", reserved_bytes=11 * GIB)
    data["device_peak"] |= {"reserved_bytes": 11 * GIB, "non_torch_bytes": 0}
    data["source"]["history"] = "none"
    path = tmp_path / "state.json"

    def asked() -> dict[str, Any]:
        path.write_text(json.dumps(data))
        found: dict[str, Any] = json.loads(_invoke("advise", str(path), "--gpu", "16GiB", "--json", "-").stdout)
        return dict(found["combination"])

    alone = asked()
    assert alone["sentence"].startswith("What was recorded fits as it is")
    assert "shows one moment" in alone["sentence"]
    data["oom"] = {"requested_bytes": 5 * GIB, "device_free_bytes": 0, "phase": "load", "step": None, "stack": []}
    data["source"]["history"] = "complete"
    failed = asked()
    assert failed["before_bytes"] == 16 * GIB
    assert "does not show the whole run" in failed["sentence"]
    assert [change["id"] for change in failed["changes"]] == ["smaller_weights"]


def test_what_fits_in_no_way_ends_with_4(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wiring only: what is found is tested where it is looked for."""
    pytest.importorskip("trl")
    together = {
        "gpu": "1GB", "total_bytes": 10**9, "fits": False, "before_bytes": 60 * GIB, "after_bytes": 9 * GIB,
        "shift_bytes": 0, "margin": 0.03, "phase": "forward", "changes": [], "settings": {},
        "sentence": "Nothing fits.",
    }  # fmt: skip
    monkeypatch.setattr(
        "memprof.advice.simulated_advice.with_simulated_advice",
        lambda report, *_, **__: replace(report, combination=from_builtins(together, Combination)),
    )
    done = _invoke("advise", str(known), "--gpu", "1GB")
    assert done.exit_code == 4
    assert "Nothing fits." in done.stdout


@pytest.mark.trl
@pytest.mark.slow
def test_a_set_that_fits_is_found_and_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled down: a small model on a card with a few hundred MiB beside CUDA's context."""
    for package in ("torch", "transformers", "trl", "peft"):
        pytest.importorskip(package)
    monkeypatch.setenv("MEMPROF_CACHE", str(tmp_path / "cache"))
    model = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 8000, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(model))
    run = tmp_path / "run.pickle"
    made = _invoke(
        "simulate", "--model", str(tmp_path / "config.json"), "--num-generations", "4", "--per-device-train-batch-size",
        "4", "--prompt-length", "100", "--completion-length", "200", "--generation", "none",
        "--no-gradient-checkpointing", "-o", str(run),
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    asked = ["advise", str(run), "--seconds", "0", "--json", "-"]
    done = _invoke(*asked, "--gpu", "930MiB", "--workers", "1")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    validate(data)
    together = data["combination"]
    assert together["fits"]
    assert together["changes"]
    assert together["after_bytes"] * (1 + together["margin"]) <= 930 * 2**20 < together["before_bytes"] * 1.03
    unchanged = data["unchanged"]
    assert unchanged["simulated_bytes"] == pytest.approx(unchanged["measured_bytes"], abs=4096)

    page = tmp_path / "page.html"
    report = _invoke("report", *asked[1:], "--advise", "--gpu", "930MiB", "-o", str(page))
    assert report.exit_code == 0, report.output
    same = json.loads(report.stdout)
    validate(same)
    for name in ("advice", "combination", "unchanged", "notes"):
        assert same[name] == data[name]
    assert escape(together["sentence"]) in page.read_text(encoding="utf-8")

    (tmp_path / "set.json").write_text(json.dumps(together["settings"]))
    alone = _invoke("simulate", "--config", str(tmp_path / "set.json"), "--gpu", "930MiB", "--format", "json")
    assert alone.exit_code == 0, alone.stderr
    assert json.loads(alone.stdout)["fit"]["needed_bytes"] == together["after_bytes"]
