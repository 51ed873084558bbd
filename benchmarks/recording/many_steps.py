"""Train ten thousand fast steps with and without the callback, in turns: CPU and wall time, RSS and disk.

    python -m benchmarks.recording many-steps [--steps 10000] [--way WAY ...] [--json FILE]

Each training is a process of its own. They take turns after every 200 steps, so that a slow moment of the machine meets
them all, and each says after its turn what it used. ``board`` and ``mlflow`` are to be compared with ``board-alone``
and ``mlflow-alone``, the others with ``alone``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import write_result
from benchmarks.recording.overhead import NEVER
from benchmarks.tabling import ROOT

TURN = 200
# The callback's options and the trainer's trackers; None: no callback.
WAYS: dict[str, tuple[dict[str, Any] | None, str]] = {
    "alone": (None, "none"),
    "default": ({}, "none"),
    "every-50": ({"every": 50}, "none"),
    "board-alone": (None, "tensorboard"),
    "board": ({}, "tensorboard"),
    "mlflow-alone": (None, "mlflow"),
    "mlflow": ({}, "mlflow"),
}


def train(way: str, folder: Path, steps: int) -> None:
    """Train; after each turn print what it used, and wait for a line."""
    import torch
    from transformers import TrainerCallback

    from memprof import MemProfCallback
    from memprof.recording.system.host import rss_bytes
    from tests.integrations.runs import checkpoint, plain

    torch.set_num_threads(1)
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    begun: dict[str, float] = {}

    class Turn(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step % TURN == 0:
                sys.stdin.readline()
                begun.update({name: clock() for name, clock in clocks.items()})

        def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step % TURN == 0:
                row: dict[str, float] = {name: clock() - begun[name] for name, clock in clocks.items()}
                files = [p.stat().st_size for p in folder.rglob("_memprof/*") if p.is_file()]
                print(json.dumps({**row, "rss": rss_bytes(), "disk": sum(files)}), flush=True)

    options, tracker = WAYS[way]
    callbacks = [] if options is None else [MemProfCallback(table=False, **options)]
    settings = {"max_steps": steps, "logging_steps": 10, "num_train_epochs": NEVER, "report_to": tracker}
    plain(checkpoint(folder), folder / "out", [*callbacks, Turn()], **settings).train()


class Training:
    """A training in a process of its own."""

    def __init__(self, way: str, folder: Path, steps: int) -> None:
        self.rows: list[dict[str, float]] = []
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, way, str(folder), str(steps)],
            env=environment, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def take_turn(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"wall"'):
                self.rows.append(json.loads(line))
                return
        raise SystemExit("a training ended early")

    def end(self) -> None:
        self._process.communicate(timeout=300)


def _summary(rows: list[dict[str, float]], last: int) -> dict[str, Any]:
    """Return milliseconds a step without the first turn, and RSS and disk in MB after every ``last`` turns."""
    timed = rows[1:]
    steps = TURN * len(timed)
    ends = rows[last - 1 :: last]
    return {
        **{f"{name}_ms": round(sum(row[name] for row in timed) / steps * 1e3, 3) for name in ("cpu", "wall")},
        "rss_mb": [round(row["rss"] / 1e6, 1) for row in ends],
        "disk_mb": [round(row["disk"] / 1e6, 2) for row in ends],
    }


@click.command(help=__doc__)
@click.option("--steps", default=10_000, show_default=True)
@click.option("--way", "ways", multiple=True, type=click.Choice(list(WAYS)), help="Default: all.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(steps: int, ways: tuple[str, ...], path: Path | None) -> None:
    with tempfile.TemporaryDirectory() as place:
        trainings = {}
        for way in ways or WAYS:
            (folder := Path(place, way)).mkdir()
            trainings[way] = Training(way, folder, steps)
        for _ in range(steps // TURN):
            for training in trainings.values():
                training.take_turn()
        for training in trainings.values():
            training.end()
    found = {way: _summary(training.rows, max(1, steps // TURN // 10)) for way, training in trainings.items()}
    write_result({"what": "steps of a fast model, in turns", "steps": steps, "ways": found}, path)


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
