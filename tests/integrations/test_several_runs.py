"""Several trainings into one ``output_dir``: each has a folder of its own, the newest is read, the others are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("trl")

from memprof.integrations.board.recordings import Recordings

from memprof import MemProfCallback
from memprof.cli import main
from tests.integrations.runs import plain

pytestmark = pytest.mark.trl


def command(*arguments: str) -> Any:
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == 0, done.output
    return done


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
        assert f"memprof: {out / '_memprof'} holds an earlier run; this one is written to {moved}." in said
    assert {path.name: path.read_bytes() for path in (out / "_memprof").iterdir()} == first
    kept = {folder.name: sorted(p.name[:11] for p in folder.glob("*.pickle")) for folder in out.glob("_memprof*")}
    assert kept == {
        "_memprof": [f"step-00000{step}" for step in range(1, 6)],
        "_memprof-2": ["step-000001", "step-000002"],
        "_memprof-3": ["step-000003"],  # max_disk is each run's own
    }
    assert callback.result.snapshots == sorted((out / "_memprof-2").glob("*.pickle"))

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
