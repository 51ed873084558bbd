"""Run ten thousand steps with nothing but counters: what memprof itself holds, and how large its files become.

    python -m benchmarks.recording long-run [--steps 10000] [--trained 300] [--json FILE]

What memprof does in every step (count, write the line, fill what the trainer logs) is done that many times, and then in
a shorter run of a real ``transformers.Trainer`` with a callback that never records, whose own steps take most of the
time. Python's memory is traced; what counts is what was allocated by memprof's own lines and is still there, at ten
instants of each run. The first tenth fills caches and buffers; from then on it must not grow.
"""

from __future__ import annotations

import gc
import tempfile
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from benchmarks.measure import write_result
from benchmarks.tabling import ROOT

NEVER = 10**9
# Between a tenth of the run and its end; a leak of one small object a step would be ten times that.
LIMIT = 64 * 1024


def held() -> int:
    """Return bytes allocated by memprof's lines that are still there."""
    gc.collect()
    ours = [tracemalloc.Filter(True, str(ROOT / part / "*")) for part in ("memprof", "integrations", "reports")]
    return sum(row.size for row in tracemalloc.take_snapshot().filter_traces(ours).statistics("filename"))


def count(steps: int, out: Path) -> list[dict[str, int]]:
    """Count alone, with as much of a trainer as counting looks at; return a row for every tenth of the way."""
    from memprof.integrations.trackers.step_logging import StepTracking

    from memprof.recording.guard import NULL_GUARD, MethodPatcher
    from memprof.report.counters import CountersStart

    state = SimpleNamespace(global_step=0, max_steps=steps, is_world_process_zero=True)
    handler = SimpleNamespace(callbacks=[])
    trainer = SimpleNamespace(state=state, accelerator=None, callback_handler=handler, log=lambda logs: None)

    seams = MethodPatcher(NULL_GUARD, lambda error: None)
    folder = out / "_memprof"
    rows: list[dict[str, int]] = []
    tracemalloc.start()
    try:
        tracking = StepTracking(trainer, seams, folder, CountersStart(), False, lambda: None)
        for step in range(1, steps + 1):
            state.global_step = step
            tracking.step_end(step, None, False)
            if step % 10 == 0:
                logs = {"loss": 1.0}
                trainer.log(logs)
                assert "memory/host_rss" in logs
            if step % (steps // 10) == 0:
                rows.append(_row(step, folder))
        tracking.end()
        seams.restore()
    finally:
        tracemalloc.stop()
    return rows


def _row(step: int, folder: Path) -> dict[str, int]:
    from memprof.recording.system.host import rss_bytes

    files = sum(p.stat().st_size for p in folder.iterdir())
    return {"step": step, "held_bytes": held(), "file_bytes": files, "rss_bytes": rss_bytes()}


def train(steps: int, out: Path) -> list[dict[str, int]]:
    """Train for real; return a row for every tenth of the way."""
    import torch
    from datasets import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from memprof import MemProfCallback

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layers(x).square().mean()}

    rows: list[dict[str, int]] = []
    folder = out / "_memprof"

    class Look(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % (steps // 10) == 0:
                if not rows:
                    tracemalloc.start()  # the trainer's imports are 300,000 traces, seconds for each row
                rows.append(_row(state.global_step, folder))

    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=2, use_cpu=True, save_strategy="no",
        report_to="none", disable_tqdm=True, logging_steps=100, dataloader_pin_memory=False, optim="sgd",
        max_grad_norm=0.0,
    )  # fmt: skip
    data = Dataset.from_list([{"x": [float(i)] * 8} for i in range(64)])
    callback = MemProfCallback(steps=[NEVER], table=False)
    trainer = Trainer(Model(), arguments, train_dataset=data, callbacks=[callback, Look()])
    try:
        trainer.train()
    finally:
        tracemalloc.stop()
    return rows


@click.command()
@click.option("--steps", default=10_000, show_default=True)
@click.option("--trained", default=300, show_default=True, help="Steps of the real trainer; 0 for none.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE")
def main(steps: int, trained: int, json_file: Path | None) -> None:
    """Print a row for each tenth of the way; exit code 1 if memprof grew."""
    result: dict[str, object] = {"limit_bytes": LIMIT}
    grown = []
    for name, run, length in (("counting", count, steps), ("trainer", train, trained)):
        if not length:
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows = run(length, Path(folder))
        grown.append(rows[-1]["held_bytes"] - rows[0]["held_bytes"])
        result[name] = {"steps": length, "grown_bytes": grown[-1], "rows": rows}
    write_result(result, json_file)
    if max(grown) > LIMIT:
        raise SystemExit(1)
