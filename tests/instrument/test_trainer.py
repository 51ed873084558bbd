"""A script with TRL's trainer in it, as it is, under ``memprof run`` and under accelerate's launcher."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests import forked
from tests.instrument.programs import environment, left_in, python
from tests.integrations.runs import checkpoint

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
from pathlib import Path
sys.path.append({root!r})
from tests.integrations.runs import grpo, outcome
import torch
torch.set_num_threads(1)
trainer = grpo(Path(sys.argv[1]), Path("out"), questions=8, max_completion_length=6)
trainer.train()
print(outcome(trainer))
"""


@pytest.mark.trl
def test_a_grpo_script_under_accelerate_launch_is_watched_and_computes_the_same(tmp_path: Path) -> None:
    model = str(checkpoint(tmp_path))
    (tmp_path / "train.py").write_text(SCRIPT.format(root=str(ROOT)))
    alone = forked.python(["train.py", model], tmp_path, environment())
    assert alone.returncode == 0, alone.stderr
    launch = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1")
    precision = ("--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1")
    run = ("-m", "memprof", "run", "--steps", "2")
    earlier = tmp_path / "out" / "_memprof" / "report.html"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("an earlier run's")
    watched = python(*launch, *precision, *run, "train.py", model, cwd=tmp_path)
    assert watched.returncode == 0, watched.stderr
    assert watched.stdout == alone.stdout
    assert "Peak tensor memory" in watched.stderr
    assert left_in(earlier.parent) == ["report.html"]
    assert earlier.read_text() == "an earlier run's"
    assert f"memprof: {Path('out') / '_memprof'} contains an earlier run; this run" in watched.stderr
    folder = tmp_path / "out" / "_memprof-2"
    assert left_in(folder) == [
        "counters.rank-0.jsonl", "report.html", "step-000002.rank-0.json", "step-000002.rank-0.pickle"
    ]  # fmt: skip
    report = json.loads((folder / "step-000002.rank-0.json").read_text())
    assert report["source"]["config"]["trainer"] == "GRPOTrainer"
    assert {p["phase"] for p in report["phases"]} >= {"generate", "reward", "forward", "backward", "optimizer_step"}
    assert left_in(tmp_path / "_memprof") == []  # the loop's own recording stood aside


@pytest.mark.trl
def test_a_script_with_a_callback_of_its_own_is_recorded_once(tmp_path: Path) -> None:
    """The options of ``memprof run`` are not used then, which a sentence says."""
    model = str(checkpoint(tmp_path))
    own = "callbacks=[__import__('memprof').MemProfCallback()], questions=8"
    (tmp_path / "train.py").write_text(SCRIPT.format(root=str(ROOT)).replace("questions=8", own))
    watched = python("-m", "memprof", "run", "--out", "asked", "train.py", model, cwd=tmp_path)
    assert watched.returncode == 0, watched.stderr
    assert "recorded by the script's own MemProfCallback" in watched.stderr
    assert left_in(tmp_path / "asked") == []
    (recorded,) = tmp_path.rglob("step-*.json")
    assert recorded.parent == tmp_path / "out" / "_memprof"
    assert "nothing was recorded" not in watched.stderr


@pytest.mark.trl
def test_a_trainer_in_a_process_that_the_script_starts_is_recorded(tmp_path: Path) -> None:
    """As launchers do: swift, trl, axolotl, accelerate, torchrun."""
    model = str(checkpoint(tmp_path))
    (tmp_path / "train.py").write_text(SCRIPT.format(root=str(ROOT)))
    (tmp_path / "launch.py").write_text(
        "import subprocess, sys\nsys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)\n"
    )
    alone = python("train.py", model, cwd=tmp_path)
    watched = python("-m", "memprof", "run", "--out", "asked", "launch.py", "train.py", model, cwd=tmp_path)
    assert watched.returncode == 0, watched.stderr
    assert watched.stdout == alone.stdout
    assert "nothing was recorded" not in watched.stderr
    report = json.loads((tmp_path / "asked" / "step-000002.rank-0.json").read_text())
    assert report["source"]["config"]["trainer"] == "GRPOTrainer"


_ACCELERATE = (
    "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no",
    "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1", "train.py", "MODEL",
)  # fmt: skip


@pytest.mark.heavy
@pytest.mark.trl
@pytest.mark.parametrize(
    "launcher",
    [_ACCELERATE, ("torch.distributed.run", "--nproc_per_node", "2", "train.py", "MODEL")],
    ids=["accelerate", "torchrun"],
)
def test_a_real_launcher_under_memprof_run(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """``memprof run accelerate launch ...``; with two processes each records itself, into one folder."""
    model = str(checkpoint(tmp_path))
    (tmp_path / "train.py").write_text(SCRIPT.format(root=str(ROOT)))
    arguments = [model if a == "MODEL" else a for a in launcher]
    watched = python("-m", "memprof", "run", "--out", "asked", "-m", *arguments, cwd=tmp_path)
    assert watched.returncode == 0, watched.stderr
    assert "nothing was recorded" not in watched.stderr
    ranks = 2 if arguments[2] == "2" else 1
    reports = [json.loads((tmp_path / "asked" / f"step-000002.rank-{r}.json").read_text()) for r in range(ranks)]
    assert [r["source"]["config"]["trainer"] for r in reports] == ranks * ["GRPOTrainer"]
    assert [r["source"]["world_size"] for r in reports] == ranks * [ranks]


def test_arguments_that_a_trainer_refuses_are_no_mistake_of_memprofs() -> None:
    from memprof.instrument.launched_callback import LaunchedCallback, give_callback

    class Trainer:
        def __init__(self, model: Any = None, callbacks: Any = None) -> None:
            self.callbacks = list(callbacks)

    module = ModuleType("trainer")
    module.Trainer = Trainer  # type: ignore[attr-defined]
    give_callback(module, {}, lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for wrong in ({"tokenizer": 1}, {"callbacks": 5}):  # a script tries names of other versions
            with pytest.raises(TypeError):
                Trainer(**wrong)
    assert [type(c) for c in Trainer(1).callbacks] == [LaunchedCallback]


def test_which_callback_records() -> None:
    from memprof import MemProfCallback
    from memprof.instrument.launched_callback import LaunchedCallback, _recording

    ours, second, own = LaunchedCallback(lambda: None), LaunchedCallback(lambda: None), MemProfCallback()
    for callbacks, records in (([ours], ours), ([ours, second], ours), ([ours, own], own), ([own, ours, second], own)):
        trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=callbacks))
        assert _recording(trainer, ours) is records
