"""Memory in the trainer's own logs, in the counters file, and in the trackers a trainer reports to."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from memprof import MemProfCallback
from memprof.analysis.counters import Counters, read_counters
from memprof.recording.cuda.history import CudaHistory
from memprof.recording.recorder import DeviceInfo
from memprof.simulate.fast_start import NO_MLFLOW
from memprof.units import GIB
from tests.forked import found_by_two_ranks
from tests.integrations.conftest import wrapped
from tests.integrations.runs import grpo, outcome, plain
from tests.recording.fake_cuda import Allocator
from tests.report.counters import plain as plain_line

pytestmark = [
    pytest.mark.trl,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def counters(out: Path, rank: int = 0) -> Counters:
    return read_counters(out / "_memprof" / f"counters.rank-{rank}.jsonl")


def logged(trainer: Any) -> dict[int, dict[str, float]]:
    """The ``memory/`` values of each training log, by step."""
    rows = {}
    for row in trainer.state.log_history:
        found = {k.removeprefix("memory/"): v for k, v in row.items() if k.startswith("memory/")}
        if found:
            rows[row["step"]] = found
    return rows


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, MemProfCallback]:
    """A GRPO run of four steps that reports to TensorBoard where that is installed."""
    out = tmp_path_factory.mktemp("run")
    board = ["tensorboard"] if has_tensorboard() else "none"
    callback = MemProfCallback()
    trainer = grpo(model, out, [callback], max_steps=4, report_to=board)
    trainer.train()
    return trainer, out, callback


def has_tensorboard() -> bool:
    from importlib.util import find_spec

    return find_spec("tensorboard") is not None


def test_every_training_log_carries_what_the_counters_say(finished: tuple[Any, Path, MemProfCallback]) -> None:
    trainer, out, _ = finished
    rows = {row.step: row for row in counters(out).steps}
    values = logged(trainer)
    assert list(values) == list(rows) == [1, 2, 3, 4]
    for step, found in values.items():
        assert found["host_rss"] == (rows[step].size("host_rss") or 0) / GIB > 0.05
        assert found["host_rss_peak"] >= found["host_rss"]
    assert "peak_allocated" not in values[1]  # nothing counts a CPU's tensors between recordings
    assert values[2]["peak_allocated"] == (rows[2].size("peak_allocated") or 0) / GIB


def test_a_recorded_step_says_what_its_report_says(finished: tuple[Any, Path, MemProfCallback]) -> None:
    trainer, out, callback = finished
    (report,) = callback.result.reports.values()
    values = logged(trainer)[2]
    assert values["peak_allocated"] == report.peak.allocated_bytes / GIB
    peaks: dict[str, int] = {}
    for span in report.phases:
        peaks[span.phase] = max(span.peak_allocated_bytes, peaks.get(span.phase, 0))
    for phase in ("generate", "forward", "backward"):
        assert values[f"phase/{phase}"] == peaks[phase] / GIB
    told = plain_line(counters(out).recorded)
    assert told["categories"] == {c: n for c, n in report.peak.categories.items() if n}
    assert sum(told["categories"].values()) == told["groups"]["total"] == report.peak.active_bytes
    assert plain_line(counters(out).ended).items() >= {"step": 4, "error": False}.items()


def test_tensorboard_has_every_loss_and_the_same_figures(finished: tuple[Any, Path, MemProfCallback]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer, out, callback = finished
    (events,) = (out / "runs").rglob("events.out.tfevents.*")  # one writer, the trainer's
    board = EventAccumulator(str(events.parent), size_guidance={"scalars": 0})
    board.Reload()
    losses = [(row["step"], row["loss"]) for row in trainer.state.log_history if "loss" in row]
    read = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert read == [(step, pytest.approx(loss, rel=1e-6, abs=1e-9)) for step, loss in losses]
    for step, values in logged(trainer).items():
        for name, value in values.items():
            found = {e.step: e.value for e in board.Scalars(f"train/memory/{name}")}
            assert found[step] == pytest.approx(value, rel=1e-6)
    (report,) = callback.result.reports.values()
    for kind in ("category", "group"):
        part = report.peak.categories.items() if kind == "category" else report.peak.groups.items()
        for name, size in ((name, size) for name, size in part if size):
            (event,) = board.Scalars(f"train/memory/{kind}/{name}")
            assert (event.step, event.value) == (2, pytest.approx(size / GIB, rel=1e-6))
    assert "custom_scalars__config__" in board.Tags()["tensors"]


def test_the_run_is_the_same_to_the_bit(model: Path, tmp_path: Path, finished: tuple[Any, Path, Any]) -> None:
    alone = grpo(model, tmp_path, max_steps=4)
    alone.train()
    assert outcome(alone) == outcome(finished[0])
    assert wrapped(finished[0]) == set()


def test_logs_further_apart_carry_the_highest_of_the_steps_between(model: Path, tmp_path: Path) -> None:
    trainer = grpo(model, tmp_path, [MemProfCallback(report=False, steps=[1, 2])], max_steps=4, logging_steps=4)
    trainer.train()
    rows = counters(tmp_path).steps
    (values,) = logged(trainer).values()
    assert values["peak_allocated"] == max(r.size("peak_allocated") or 0 for r in rows[:2]) / GIB
    assert values["host_rss"] == (rows[-1].size("host_rss") or 0) / GIB


def test_scalars_can_be_left_out(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = plain(model, tmp_path / "a", [MemProfCallback(report=False, scalars=False)])
    trainer.train()
    assert logged(trainer) == {}
    assert not list((tmp_path / "a").rglob("counters*"))
    monkeypatch.setenv("MEMPROF", "0")
    trainer = plain(model, tmp_path / "b", [MemProfCallback()])
    trainer.train()
    assert logged(trainer) == {}
    assert not (tmp_path / "b" / "_memprof").exists()


def test_evaluation_logs_are_left_alone(model: Path, tmp_path: Path) -> None:
    trainer = grpo(model, tmp_path, [MemProfCallback(report=False)], eval_strategy="steps", eval_steps=1)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert rows
    assert not [key for row in rows for key in row if "memory" in key]


class Broken(TrainerCallback):  # type: ignore[misc]
    """A user's tracker that cannot take what it is given."""

    __module__ = "transformers.integrations.none"

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if any("category" in key for key in logs):
            raise OSError("the tracker is down")


def test_a_tracker_that_fails_is_one_warning(model: Path, tmp_path: Path) -> None:
    trainer = plain(model, tmp_path, [Broken(), MemProfCallback()])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.train()
    assert len([w for w in said if "Lost: memory figures that a tracker was to get" in str(w.message)]) == 1
    assert trainer.state.global_step == 3
    assert [row.step for row in counters(tmp_path).steps] == [1, 2, 3]


def test_counters_that_cannot_be_written_are_one_warning(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    trainer = plain(model, tmp_path, [MemProfCallback(tmp_path / "file" / "x", report=False, steps=[99])])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.train()
    assert len([w for w in said if "counters" in str(w.message)]) == 1
    assert list(logged(trainer)) == [1, 2, 3]


def test_an_error_is_said_in_the_counters(model: Path, tmp_path: Path) -> None:
    class Stops(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                raise RuntimeError("somebody's own")

    trainer = plain(model, tmp_path, [MemProfCallback(report=False), Stops()])
    with pytest.raises(RuntimeError, match="somebody's own"):
        trainer.train()
    ended = counters(tmp_path).ended
    assert ended is not None
    assert (ended.error, ended.step) == (True, 1)


# -- CUDA's counters, by the stand-in for the allocator ---------------------------------------------------------------


def on_stand_in(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """Return a trainer whose four steps allocate 100, 50, 300 and 20 KiB beside what stays allocated."""
    allocator = Allocator()

    def make_recorder(*_: Any, **options: Any) -> CudaHistory:
        return CudaHistory(torch.device("cuda", 0), backend=allocator, max_entries=options["max_entries"])

    monkeypatch.setattr("memprof.integrations.callback.sessions.make_recorder", make_recorder)
    monkeypatch.setattr(CudaHistory, "device", lambda self: DeviceInfo(0, "cuda", "Pretend", 24 * 10**9))
    trainer = plain(model, out, [MemProfCallback(report=False, kind="cuda")], max_steps=4, **settings)
    allocator.malloc(8192)
    original, kib = trainer.compute_loss, iter([100, 50, 300, 20])

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        allocator.free(allocator.malloc(next(kib) * 1024))
        return original(*args, **kwargs)

    trainer.compute_loss = compute_loss
    return trainer


def test_steps_that_share_a_line_share_its_peak(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are as far apart as here if steps take milliseconds."""
    monkeypatch.setattr("memprof.integrations.trackers.step_logging._PAUSE", 1e9)
    trainer = on_stand_in(model, tmp_path, monkeypatch, logging_steps=4)
    trainer.train()
    first, recorded, *others = counters(tmp_path).steps
    assert (first.step, recorded.step, recorded.recorded) == (1, 2, True)
    assert [(row.step, row.peak_allocated) for row in others][-1] == (4, 300 * 1024 + 8192)
    assert len(others) == 1
    (values,) = logged(trainer).values()
    assert values["peak_allocated"] * GIB == 300 * 1024 + 8192


def test_cuda_counts_every_step(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = on_stand_in(model, tmp_path, monkeypatch)
    trainer.train()
    rows = counters(tmp_path).steps
    highest = [n * 1024 + 8192 for n in (100, 50, 300, 20)]
    assert [row.peak_allocated for row in rows] == highest
    assert [plain_line(row)["phases"]["forward"] for row in rows] == highest
    assert [row.allocated for row in rows] == [8192] * 4
    assert [v["peak_allocated"] * GIB for v in logged(trainer).values()] == highest
    assert {"peak_reserved", "inactive_split", "cached"} <= logged(trainer)[1].keys()


# -- several ranks -----------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_ranks_are_put_beside_each_other(model: Path, tmp_path: Path) -> None:
    history, _ = found_by_two_ranks("tests.integrations.tracked_ranks", tmp_path, str(model))
    log = {r["step"]: r for r in history if "loss" in r}
    first, second = (counters(tmp_path / "out", rank) for rank in (0, 1))
    assert (first.world_size, second.rank) == (2, 1)
    for step in (1, 3):
        rss = [{r.step: r for r in run.steps}[step].host_rss for run in (first, second)]
        assert [log[step][f"memory/rank_{r}/host_rss"] for r in (0, 1)] == [n / GIB for n in rss]
        assert log[step]["memory/max/host_rss"] == max(rss) / GIB
        assert log[step]["memory/imbalance/host_rss"] == pytest.approx(max(rss) / (sum(rss) / 2) - 1)
    assert log[2]["memory/rank_1/peak_allocated"] > log[2]["memory/rank_0/peak_allocated"] + 0.06


def environment() -> dict[str, str]:
    import os

    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MEMPROF")}


# -- trackers ----------------------------------------------------------------------------------------------------------


def test_mlflow_gets_scalars_and_the_page(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv(NO_MLFLOW)
    monkeypatch.setattr("trl.extras.profiling.mlflow", mlflow, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = (tmp_path / "store").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    mlflow.set_tracking_uri(store)
    callback = MemProfCallback()
    trainer = grpo(model, tmp_path / "run", [callback], report_to=["mlflow"])
    trainer.train()
    mlflow.flush_async_logging()
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    assert run.info.status == "FINISHED"
    for step, values in logged(trainer).items():
        for name, value in values.items():
            history = {m.step: m.value for m in client.get_metric_history(run.info.run_id, f"memory/{name}")}
            assert history[step] == pytest.approx(value)
    assert "memory/category/weights" in run.data.metrics
    (artifact,) = client.list_artifacts(run.info.run_id, "memprof")
    assert artifact.path == "memprof/report.html"
    assert callback.result.page is not None
    assert artifact.file_size == callback.result.page.stat().st_size


def test_wandb_offline_gets_scalars_and_the_page(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    script = (
        "import sys, torch\nfrom pathlib import Path\ntorch.set_num_threads(1)\n"
        "from memprof import MemProfCallback\nfrom tests.integrations.runs import plain\nimport wandb\n"
        "stored = []\n"
        "log = wandb.Run.log_artifact\n"
        "wandb.Run.log_artifact = lambda self, a, *r, **k: (stored.append(a), log(self, a, *r, **k))[1]\n"
        "trainer = plain(Path(sys.argv[1]), Path('run'), [MemProfCallback()], report_to=['wandb'])\n"
        "trainer.train()\n"
        "summary = dict(wandb.run.summary)\nwandb.finish()\n"
        "import json; print('RESULT' + json.dumps([sorted(map(str, summary)),"
        " [[a.type, sorted(a.manifest.entries)] for a in stored]]))\n"
    )
    root = Path(__file__).resolve().parents[2]
    settings = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(model)],
        capture_output=True, text=True, cwd=tmp_path, env={**environment(), **settings}, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "memprof could not" not in done.stderr
    keys, artifacts = json.loads(done.stdout.split("RESULT")[1])
    assert {"train/memory/host_rss", "train/memory/category/weights", "memprof"} <= set(keys)
    assert artifacts == [["memprof-report", ["report.html"]]]
    assert list(tmp_path.rglob("*.wandb"))
    (shown,) = tmp_path.rglob("media/html/*.html")
    assert "<!DOCTYPE html>" in shown.read_text(encoding="utf-8")[:200]


def test_trackio_gets_scalars_and_the_page(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    script = (
        "import sys, torch\nfrom pathlib import Path\ntorch.set_num_threads(1)\n"
        "from memprof import MemProfCallback\nfrom tests.integrations.runs import plain\n"
        "callbacks = [MemProfCallback()]\n"
        "plain(Path(sys.argv[1]), Path('run'), callbacks, report_to=['trackio'], project='memprof').train()\n"
    )
    root = Path(__file__).resolve().parents[2]
    settings = {"TRACKIO_DIR": str(tmp_path / "store"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(model)],
        capture_output=True, text=True, cwd=tmp_path, env={**environment(), **settings}, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "memprof could not" not in done.stderr
    with sqlite3.connect(tmp_path / "store" / "memprof.db") as store:
        stored = " ".join(str(row) for row in store.execute("select metrics from metrics"))
    assert "train/memory/host_rss" in stored
    assert "train/memory/category/weights" in stored
    blobs = [p.read_bytes() for p in (tmp_path / "store" / "artifacts").rglob("*") if p.is_file()]
    assert (tmp_path / "run" / "_memprof" / "report.html").read_bytes() in blobs
