"""Ten thousand steps with nothing but counters: what memprof itself holds, and how large its files become.

    python -m benchmarks.long_run [--steps 10000] [--json FILE]

A real ``transformers.Trainer`` on a model of two layers, with a callback that never records. Python's memory is traced;
what counts is what was allocated by memprof's own lines and is still there, at ten instants of the run. The first tenth
fills caches and buffers; from then on it must not grow.
"""

from __future__ import annotations

import gc
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import write_result

NEVER = 10**9
# Between a tenth of the run and its end; a leak of one small object a step would be ten times that.
LIMIT = 64 * 1024
ROOT = Path(__file__).resolve().parents[1]


def held() -> int:
    """Bytes allocated by memprof's lines that are still there."""
    gc.collect()
    ours = [tracemalloc.Filter(True, str(ROOT / part / "*")) for part in ("memprof", "integrations", "reports")]
    return sum(row.size for row in tracemalloc.take_snapshot().filter_traces(ours).statistics("filename"))


def train(steps: int, out: Path) -> list[dict[str, int]]:
    """The run; a row for every tenth of it."""
    import torch
    from datasets import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from memprof import MemProfCallback
    from memprof.record.host import rss_bytes

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
                files = sum(p.stat().st_size for p in folder.iterdir())
                row = {"step": state.global_step, "held_bytes": held(), "file_bytes": files, "rss_bytes": rss_bytes()}
                rows.append(row)

    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=2, use_cpu=True, save_strategy="no",
        report_to="none", disable_tqdm=True, logging_steps=100, dataloader_pin_memory=False, optim="sgd",
        max_grad_norm=0.0,
    )  # fmt: skip
    data = Dataset.from_list([{"x": [float(i)] * 8} for i in range(64)])
    callback = MemProfCallback(steps=[NEVER], table=False)
    trainer = Trainer(Model(), arguments, train_dataset=data, callbacks=[callback, Look()])
    tracemalloc.start()
    try:
        trainer.train()
    finally:
        tracemalloc.stop()
    return rows


@click.command()
@click.option("--steps", default=10_000, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE")
def main(steps: int, json_file: Path | None) -> None:
    """Print a row for each tenth of the run; exit code 1 if memprof grew."""
    with tempfile.TemporaryDirectory() as folder:
        rows = train(steps, Path(folder))
    for row in rows:
        click.echo("  ".join(f"{name} {value:>12,}" for name, value in row.items()))
    grown = rows[-1]["held_bytes"] - rows[0]["held_bytes"]
    click.echo(f"memprof's own memory from step {rows[0]['step']} to {rows[-1]['step']}: {grown:+,} bytes")
    if json_file is not None:
        write_result({"steps": steps, "rows": rows, "grown_bytes": grown, "limit_bytes": LIMIT}, json_file)
    if grown > LIMIT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
