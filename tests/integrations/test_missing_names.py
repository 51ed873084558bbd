"""Run the callback where a name it uses is gone: the run goes on, and the report says what is missing.

``tests/compat`` holds that each name that is gone is found out; here the callback itself runs without it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from memprof.compat.check import TARGETS, fault_of
from memprof.compat.targets import Target
from memprof.compat.trl import BUFFERED, LOGPS_OUTSIDE_LOSS, SCORE_REWARDS
from tests.compat.removal import remove
from tests.integrations.runs import plain

pytestmark = pytest.mark.trl

ROOT = Path(__file__).resolve().parents[2]
_IDS = {"ids": lambda target: f"{target.module}:{target.path}"}
OPTIONAL = [t for t in TARGETS if "callback" in t.optional_for]
NEEDED = [t for t in TARGETS if "callback" in t.needed_by and t.package == "transformers"]


def _note(target: Target) -> str:
    return f"{target.consequence[:1].upper()}{target.consequence[1:]}: {target.path} is not in the "


def test_the_report_notes_each_name_that_is_gone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each name is taken away for the length of the callback's look at what is installed, and put back to train."""
    from memprof.integrations.callback import training_run

    from memprof import MemProfCallback

    pytest.importorskip("trl.trainer.grpo_trainer")
    look = training_run.missing
    gone = [target for target in OPTIONAL if target.is_loaded and fault_of(target) is None]
    assert {"trl", "transformers", "accelerate", "torch"} <= {target.package for target in gone}

    def without(feature: str, of: object) -> list[str]:
        assert look(feature, of=of) == []
        notes: list[str] = []
        for target in gone:
            with pytest.MonkeyPatch.context() as patch:
                remove(target, patch)
                notes += look(feature)
        return notes

    monkeypatch.setattr(training_run, "missing", without)
    callback = MemProfCallback(table=False, steps=1)
    plain(model, tmp_path / "out", [callback], max_steps=1).train()
    (report,) = callback.result.reports.values()
    unsaid = [target for target in gone if not any(note.startswith(_note(target)) for note in report.notes)]
    assert unsaid == []


SCRIPT = """
import sys, json, warnings
from pathlib import Path
sys.path.insert(0, {root!r})
import trl
assert trl.__file__.startswith({copy!r}), trl.__file__
from memprof import MemProfCallback
from tests.integrations.runs import grpo
callback = MemProfCallback(table=False)
alone = grpo({model!r}, Path({out!r}, "alone"))
alone.train()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    trainer = grpo({model!r}, Path({out!r}, "watched"), [callback])
    trainer.train()
(report,) = callback.result.reports.values()
print(json.dumps({{
    "losses": [[row["loss"] for row in run.state.log_history if "loss" in row] for run in (alone, trainer)],
    "notes": report.notes,
    "phases": sorted({{str(row.phase) for row in report.phases}}),
    "said": [str(w.message) for w in said if "memprof" in str(w.message)],
}}))
"""


def _run_with(copy: Path, model: Path, out: Path) -> dict[str, object]:
    """A real GRPO run and a watched one in another process, in which ``import trl`` finds the copy."""
    code = SCRIPT.format(root=str(ROOT), copy=str(copy), model=str(model), out=str(out))
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def altered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TRL, with a copy of its files in which three names the callback uses are called something else."""
    trl = pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("altered")
    shutil.copytree(Path(trl.__file__).parent, folder / "trl", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / "trl").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for target in (SCORE_REWARDS, BUFFERED, LOGPS_OUTSIDE_LOSS):
            text = text.replace(target.name, f"{target.name}_anew")
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_an_altered_trl_trains_as_it_would_and_the_report_says_what_is_missing(
    altered: Path, model: Path, tmp_path: Path
) -> None:
    seen = _run_with(altered, model, tmp_path)
    alone, watched = seen["losses"]  # type: ignore[misc]
    assert watched == alone
    assert len(watched) == 2
    assert seen["said"] == []
    for target in (SCORE_REWARDS, BUFFERED, LOGPS_OUTSIDE_LOSS):
        assert any(note.startswith(_note(target)) for note in seen["notes"]), seen["notes"]  # type: ignore[attr-defined]
    assert "reward" not in seen["phases"]  # type: ignore[operator]
    assert {"generate", "forward", "backward", "optimizer_step"} <= set(seen["phases"])  # type: ignore[call-overload]


@pytest.mark.parametrize("target", NEEDED, **_IDS)
def test_without_what_it_needs_the_callback_says_so_once_and_the_run_goes_on(
    target: Target, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memprof.integrations.callback import callback as callbacks

    from memprof import MemProfCallback

    look = callbacks.require

    def without(feature: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            remove(target, patch)
            look(feature)

    monkeypatch.setattr(callbacks, "require", without)
    callback = MemProfCallback(table=False)
    with pytest.warns(UserWarning, match="memprof does not watch this training, which goes on: The callback ") as said:
        done = plain(model, tmp_path / "out", [callback]).train()
    assert done.global_step == 3
    (sentence,) = [str(w.message) for w in said if "memprof" in str(w.message)]
    assert f"{target.path} is not in the Transformers that is installed" in sentence
    assert callback.result.snapshots == []
