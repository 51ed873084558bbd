"""A real vLLM in the process, on a CPU: its bytes beside what its own objects have. `make engines` installs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from memprof import analyze

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make engines"),
]
ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> dict[str, Any]:
    """Run a program to its end and return what it prints last."""
    env = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.engines.programs", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_trls_engine_is_an_owner_and_training_is_the_same(tmp_path: Path) -> None:
    """The engine is older than the recording."""
    for name in ("alone", "watched"):
        (tmp_path / name).mkdir()
    alone, watched = (run("colocate", str(tmp_path / name), name) for name in ("alone", "watched"))
    assert (alone["parameters"], alone["losses"]) == (watched["parameters"], watched["losses"])
    assert len(set(alone["losses"])) == 4
    report = json.loads((tmp_path / "watched" / "out" / "_memprof" / "step-000002.rank-0.json").read_text())
    categories, truth = report["peak"]["categories"], watched["truth"]
    assert categories["kv_cache"] == truth["kv_cache"] > 1 << 29
    assert categories["weights"] == truth["weights"]
    assert categories["adapters"] == 0
    # Beside its model an engine has buffers of the runner; what TRL sends passes through.
    assert truth["model"] <= categories["inference_engine"] <= truth["model"] + (4 << 20)
    assert categories["unattributed"] < 1 << 16
    assert {p["phase"] for p in report["phases"]} >= {"generate", "reward", "forward", "backward", "optimizer_step"}
    assert "weight_sync" in {switch["phase"] for switch in report["switches"]}


def test_an_engine_built_inside_a_recording_and_one_that_watches_itself(tmp_path: Path) -> None:
    truth = run("inside", str(tmp_path))["truth"]
    categories = analyze(tmp_path / "run.pickle").peak.categories
    assert categories["kv_cache"] == truth["kv_cache"]
    assert categories["weights"] >= truth["weights"]
    assert truth["model"] <= categories["inference_engine"] <= truth["model"] + (4 << 20)
    assert categories["unattributed"] + categories["inputs"] + categories["adapters"] < 1 << 16
    (snapshot,) = (tmp_path / "engine" / "rollout").glob("*.pickle")
    engine = analyze(snapshot)
    assert engine.peak.categories["kv_cache"] == truth["kv_cache"]
    assert "generate" in {phase.phase for phase in engine.phases}


def test_the_lean_trainer_trains_as_trl_on_the_same_completions(tmp_path: Path) -> None:
    """With the engine's own completions losses drift apart, as sampling amplifies the last bits of the weights."""
    found = {}
    for kind in ("trl", "lean", "parked"):
        (tmp_path / kind).mkdir()
        found[kind] = run("replayed", str(tmp_path / kind), kind, str(tmp_path / "completions.json"))
    for kind in ("lean", "parked"):
        assert found[kind]["rewards"] == found["trl"]["rewards"]
        assert found[kind]["losses"] == pytest.approx(found["trl"]["losses"], abs=1e-5)
        assert found[kind]["norms"] == pytest.approx(found["trl"]["norms"], rel=1e-3)
    assert found["parked"]["parked"] > 0 == found["lean"]["parked"]
