"""Time steps that are not recorded, of a model so small that a step takes milliseconds, beside steps without memprof.

    python -m benchmarks.recording unrecorded [--steps 2000] [--json FILE]

Trainings without memprof, with a callback that records nothing, and with one that also counts nothing run in threads
that take turns after every step, so that a slow moment of the machine meets them all. A step that takes seconds costs
as many microseconds.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import write_result
from benchmarks.recording.overhead import NEVER

# Steps before the clock starts: buffers and caches fill.
WARM = 50
# Milliseconds of a step.
_Times = dict[str, list[float]]


class Turns:
    """Let threads work in turn, one step each."""

    def __init__(self, names: list[str]) -> None:
        self._next = dict(zip(names, [*names[1:], names[0]], strict=True))
        self._open = {name: threading.Semaphore(name == names[0]) for name in names}

    def wait(self, name: str) -> None:
        self._open[name].acquire()

    def pass_on(self, name: str) -> None:
        self._open[self._next[name]].release()


def timed(name: str, model: Path, folder: Path, steps: int, callbacks: list[Any], turns: Turns) -> tuple[Any, _Times]:
    """Return a trainer whose steps take turns with the others', and where it leaves their wall and CPU milliseconds."""
    from transformers import TrainerCallback

    from tests.integrations.runs import plain

    times: _Times = {"wall": [], "cpu": []}
    begun = {"wall": 0.0, "cpu": 0.0}
    clocks = {"wall": time.perf_counter, "cpu": time.thread_time}

    class Turn(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            ended = {key: clock() for key, clock in clocks.items()}
            for key, milliseconds in times.items():
                milliseconds.append((ended[key] - begun[key]) * 1e3)
            turns.pass_on(name)
            turns.wait(name)
            begun.update({key: clock() for key, clock in clocks.items()})

    settings = {"max_steps": WARM + steps, "logging_steps": NEVER, "num_train_epochs": NEVER}
    return plain(model, folder, [*callbacks, Turn()], **settings), times


@click.command(help=__doc__)
@click.option("--steps", default=2000, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(steps: int, path: Path | None) -> None:
    import torch

    from memprof import MemProfCallback
    from tests.integrations.runs import checkpoint

    torch.set_num_threads(1)
    never: dict[str, Any] = {"steps": NEVER, "table": False}
    watch: dict[str, Callable[[Path], list[Any]]] = {
        "alone": lambda _: [],
        "counted": lambda folder: [MemProfCallback(folder, **never)],
        "not_counted": lambda folder: [MemProfCallback(folder, scalars=False, **never)],
    }
    turns = Turns(list(watch))
    with tempfile.TemporaryDirectory() as place:
        model, folder = checkpoint(Path(place)), Path(place)
        runs = {
            name: timed(name, model, folder / name, steps, callbacks(folder / f"{name}-records"), turns)
            for name, callbacks in watch.items()
        }

        def train(name: str) -> None:
            turns.wait(name)
            try:
                runs[name][0].train()
            finally:
                turns.pass_on(name)

        threads = [threading.Thread(target=train, args=(name,)) for name in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    times = {name: {key: one[WARM:] for key, one in found.items()} for name, (_, found) in runs.items()}
    alone = {key: round(statistics.median(times["alone"][key]), 3) for key in ("wall", "cpu")}
    facts = {"what": "steps that are not recorded", "steps": steps, "milliseconds_alone": alone}
    write_result({**facts, "milliseconds_added": {name: added(times, name) for name in times if name != "alone"}}, path)


def added(times: dict[str, _Times], name: str) -> dict[str, dict[str, float]]:
    """Return what a step costs more than that without memprof in the same turn; the mean is of nine tenths."""
    found = {}
    for key in ("wall", "cpu"):
        pairs = [one - other for one, other in zip(times[name][key], times["alone"][key], strict=True)]
        middle = sorted(pairs)[len(pairs) // 20 : -len(pairs) // 20]
        found[key] = {"median": round(statistics.median(pairs), 4), "mean": round(statistics.fmean(middle), 4)}
    return found
