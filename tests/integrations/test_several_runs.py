"""Several trainings into one ``output_dir``: each has a folder of its own, the newest is read, the others are named."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("trl")

import torch
from memprof.integrations.board.plugin import _newest_run_first
from memprof.integrations.board.recordings import Recordings
from memprof.integrations.run_recorder import run_folder

from memprof import MemProfCallback, load_snapshot
from memprof.analysis.counters import read_counters
from memprof.cli import main
from tests import forked
from tests.integrations.runs import grpo, length_reward, plain

pytestmark = pytest.mark.trl


def command(*arguments: str) -> Any:
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == 0, done.output
    return done


def identities(folder: Path) -> set[tuple[str, float]]:
    """Return the run's id and start in every snapshot, report and counters file of a folder."""
    found = []
    for path in folder.glob("*.pickle"):
        run = load_snapshot(path).run
        found.append((run.run_id, run.run_started))
    for path in folder.glob("step-*.json"):
        source = json.loads(path.read_text())["source"]
        found.append((source["run_id"], source["run_started"]))
    for path in folder.glob("counters.*"):
        about = read_counters(path).about
        found.append((about.run_id, about.started))
    assert all(isinstance(name, str) and isinstance(started, float) for name, started in found)
    return set(found)


def test_a_training_in_the_place_of_a_deleted_one_is_the_newest(model: Path, tmp_path: Path) -> None:
    """Its folder has the lowest number."""
    out = tmp_path / "out"
    for _ in range(2):
        plain(model, out, [MemProfCallback(table=False)], max_steps=2).train()
    shutil.rmtree(out / "_memprof")
    plain(model, out, [MemProfCallback(table=False)], max_steps=2, per_device_train_batch_size=1).train()
    report = json.loads(command("report", str(out), "--json", "-").stdout)
    assert report["source"]["config"]["per_device_train_batch_size"] == 1
    assert "_memprof is the newest of 2 runs in this folder. The others are _memprof-2." in report["notes"]
    watched = json.loads(command("watch", str(out), "--format", "json").stdout)
    assert [rank["run_id"] for rank in watched["ranks"]] == [report["source"]["run_id"]]
    assert [r.run for r in _newest_run_first(Recordings([("", tmp_path)]).all())] == ["out", "out/_memprof-2"]


def test_three_trainings_into_one_folder(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one who ran out of memory trains again with half the batch, and once more."""
    out = tmp_path / "out"
    callback = MemProfCallback(every=1, table=False)
    plain(model, out, [callback], max_steps=5, per_device_train_batch_size=4).train()
    first = {path.name: path.read_bytes() for path in (out / "_memprof").iterdir()}
    size = (out / "_memprof" / "step-000005.rank-0.pickle").stat().st_size
    plain(model, out, [callback], max_steps=2).train()  # the same callback
    plain(model, out, [MemProfCallback(every=1, table=False, max_disk=size)], per_device_train_batch_size=1).train()
    said = capsys.readouterr().err
    for number in (2, 3):
        moved = out / f"_memprof-{number}"
        assert f"memprof: {out / '_memprof'} contains an earlier run; this run is written to {moved}." in said
    assert {path.name: path.read_bytes() for path in (out / "_memprof").iterdir()} == first
    kept = {folder.name: sorted(p.name[:11] for p in folder.glob("*.pickle")) for folder in out.glob("_memprof*")}
    assert kept == {
        "_memprof": [f"step-00000{step}" for step in range(1, 6)],
        "_memprof-2": ["step-000001", "step-000002"],
        "_memprof-3": ["step-000003"],  # max_disk is each run's own
    }
    assert callback.result.snapshots == sorted((out / "_memprof-2").glob("*.pickle"))
    runs = [identities(out / name) for name in sorted(kept)]
    assert [len(run) for run in runs] == [1, 1, 1]  # all files of a run have the same
    assert len({name for run in runs for name, _ in run}) == 3
    began = [started for run in runs for _, started in run]
    assert began == sorted(began)

    others = "_memprof-3 is the newest of 3 runs in this folder. The others are _memprof-2, _memprof."
    report = json.loads(command("report", str(out), "--json", "-").stdout)
    assert report["source"]["config"]["per_device_train_batch_size"] == 1
    assert report["peak"]["step"] == 3
    assert others in report["notes"]
    assert f"memprof: {others}" in command("watch", str(out), "--once").stderr
    assert f"memprof: {others}" in command("advise", str(out), "--estimate").stderr
    earlier = command("report", str(out / "_memprof"))
    assert "_memprof is not the newest of 3 runs in this folder." in " ".join(earlier.output.split())
    assert {r.run for r in Recordings([("", tmp_path)]).all()} == {"out", "out/_memprof-2", "out/_memprof-3"}


def test_a_process_knows_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    psutil = pytest.importorskip("psutil")
    assert run_folder._process_began() == pytest.approx(psutil.Process().create_time(), abs=2.0)
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")  # as on macOS
    assert run_folder._process_began() == pytest.approx(time.time(), abs=60)


def out_of_memory(model: str, out: str) -> None:
    """Train with eight completions, which is too much in the second step."""

    def reward(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step == 1:
            torch.empty(2**52, dtype=torch.uint8)
        return length_reward(completions)

    with pytest.raises(RuntimeError, match="allocate"):
        grpo(model, Path(out), [MemProfCallback(table=False)], reward=reward, per_device_train_batch_size=8).train()


@pytest.mark.parametrize("process", ["this", "another"])
def test_a_smaller_batch_after_running_out_of_memory(model: Path, tmp_path: Path, process: str) -> None:
    """The other process begins after this one, and ends before this one trains."""
    out = tmp_path / "out"
    if process == "this":
        out_of_memory(str(model), str(out))
    else:
        done = forked.python(["-m", __name__, str(model), str(out)], Path.cwd(), os.environ)
        assert done.returncode == 0, done.stderr
    failed = {path.name: path.read_bytes() for path in (out / "_memprof").iterdir()}
    grpo(model, out, [MemProfCallback(table=False)], per_device_train_batch_size=4).train()
    assert {path.name: path.read_bytes() for path in (out / "_memprof").iterdir()} == failed

    report = json.loads(command("report", str(out), "--json", "-").stdout)
    assert report["source"]["config"]["per_device_train_batch_size"] == 4
    assert report["oom"] is None
    assert "_memprof-2 is the newest of 2 runs in this folder. The others are _memprof." in report["notes"]
    earlier = json.loads(command("report", str(out / "_memprof"), "--json", "-").stdout)
    assert earlier["source"]["config"]["per_device_train_batch_size"] == 8
    assert earlier["oom"]["requested_bytes"] == 2**52
    watched = json.loads(command("watch", str(out), "--format", "json").stdout)
    assert [(rank["ended"]["step"], rank["ended"]["error"]) for rank in watched["ranks"]] == [(2, False)]
    assert [r.run for r in _newest_run_first(Recordings([("", tmp_path)]).all())] == ["out/_memprof-2", "out"]


if __name__ == "__main__":
    out_of_memory(*sys.argv[1:])
