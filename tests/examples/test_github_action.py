"""The shell steps of the example workflow, run as GitHub's runner does: each in ``bash -e``, with its files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import call
from tests.cli.test_report_ranks import record

yaml = pytest.importorskip("yaml")

WORKFLOW = Path(__file__).resolve().parents[2] / "examples" / "github_action" / "memory.yml"
TINY = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


class Runner:
    """Runs the steps of a job in a folder; ``gh`` there keeps what it was told to post."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        job = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
        self.steps = {step["name"]: step for step in job["jobs"]["memory"]["steps"] if "run" in step}
        tools = folder / "tools"
        tools.mkdir()
        self.summary, self.output = folder / "summary.md", folder / "output"
        self._tool("memprof", f'exec {sys.executable} -m memprof "$@"')
        self._tool("gh", 'while [ "$1" != --body-file ]; do echo "$1" >> posted.args; shift; done; cp "$2" posted.md')
        self.environment = {
            **os.environ, **job["env"], "OMP_NUM_THREADS": "1", "PATH": f"{tools}:{os.environ['PATH']}",
            "GITHUB_STEP_SUMMARY": str(self.summary), "GITHUB_OUTPUT": str(self.output),
        }  # fmt: skip

    def _tool(self, name: str, line: str) -> None:
        path = self.folder / "tools" / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def run(self, name: str) -> subprocess.CompletedProcess[str]:
        step: dict[str, Any] = self.steps[name]
        own = {key: self._filled(str(value)) for key, value in step.get("env", {}).items()}
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        environment = {**self.environment, **own}
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)

    def _filled(self, text: str) -> str:
        """Fill in ``${{ ... }}`` as the runner does, from the outputs of earlier steps."""
        outputs = dict(line.split("=", 1) for line in self.output.read_text().splitlines())
        known = {"github.token": "token", "github.event.pull_request.number": "7"}
        return re.sub(
            r"\$\{\{ ([\w.]+) \}\}", lambda m: known.get(m.group(1)) or outputs[m.group(1).rpartition(".")[2]], text
        )


def report(path: Path, extra_mib: int) -> None:
    snapshot = record(path.with_suffix(".pickle"), extra_mib)
    assert call("report", snapshot, "--json", path).exit_code == 0


@pytest.mark.parametrize(("now_mib", "code"), [(4, 0), (16, 1)])
def test_the_comparison_is_posted_and_decides(tmp_path: Path, now_mib: int, code: int) -> None:
    runner = Runner(tmp_path)
    report(tmp_path / "memory" / "baseline.json", 4)
    report(tmp_path / "predicted.json", now_mib)
    for name in ("Compare", "Comment"):
        done = runner.run(name)
        assert done.returncode == 0, done.stderr
    posted = (tmp_path / "posted.md").read_text(encoding="utf-8")
    assert "| this change" in posted or "this change" in posted
    assert ("more than 2% above" in posted) == bool(code)
    assert runner.summary.read_text(encoding="utf-8") == posted
    assert (tmp_path / "posted.args").read_text().split() == ["pr", "comment", "7"]
    assert runner.run("Verdict").returncode == code


def test_a_missing_baseline_fails_with_its_sentence(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    report(tmp_path / "predicted.json", 4)
    done = runner.run("Compare")
    assert done.returncode == 3
    assert "baseline.json" in done.stderr
    assert not runner.summary.exists()


def test_the_prediction_is_made_from_the_settings(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    runner = Runner(tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    settings = {"model": "tiny.json", "num_generations": 2, "per_device_train_batch_size": 2, "generation": "none"}
    (tmp_path / "memory" / "settings.yaml").write_text(yaml.safe_dump({**settings, "prompt_length": 16}))
    done = runner.run("Predict")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "predicted.json").read_text())["schema"] == "memprof.report/1"
