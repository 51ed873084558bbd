"""Measure what the counters of every step cost: seconds in memprof's own code, beside the demo's step.

    python -m benchmarks.recording counting [--steps 20] [--tokens 128] [--out demo] [--tiny] [--json FILE]

The demo is trained with a callback that never records; the functions that count, write the line and fill the
trainer's log are timed inside the run. No difference of two runs is taken: it would be lost in their noise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import write_result
from benchmarks.recording.overhead import NEVER

LIMIT = 0.01  # of the step


def timed(owner: type, names: tuple[str, ...], into: list[float]) -> Callable[[], None]:
    """Add the seconds of each call of these methods to the last of ``into``; returns what undoes it."""
    originals = {name: getattr(owner, name) for name in names}

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                into[-1] += time.perf_counter() - start

        return call

    for name, original in originals.items():
        setattr(owner, name, wrapper(original))

    def undo() -> None:
        for name, original in originals.items():
            setattr(owner, name, original)

    return undo


def measured(out: Path, tiny: bool, steps: int, tokens: int) -> dict[str, list[float]]:
    """Return the seconds of each step, and of counting in it."""
    from memprof.integrations.trackers.step_logging import Tracking
    from transformers import TrainerCallback

    from memprof import MemProfCallback
    from memprof.demo.data import load_questions
    from memprof.demo.model import prepare_checkpoint
    from memprof.demo.training import FULL, Scale, train

    begun: list[float] = []
    counting: list[float] = [0.0]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begun.append(time.perf_counter())
            counting.append(0.0)

    undo = timed(Tracking, ("step_end", "_enter_log"), counting)
    try:
        checkpoint = prepare_checkpoint(out / "_model", tiny=tiny)
        callback = MemProfCallback(output_dir=out / "_work" / "counting", steps=[NEVER])
        scale = replace(Scale(completion_tokens=tokens), steps=steps)
        train(FULL, scale, checkpoint, load_questions(8).items, out / "_work", [Clock(), callback])
    finally:
        undo()
    # From one step's beginning to the next one's, logging included; the first pays for what happens once.
    whole = [after - before for before, after in pairwise(begun[1:])]
    return {"step": whole, "counting": counting[2 : 2 + len(whole)]}


@click.command(help=__doc__)
@click.option("--steps", default=20, show_default=True)
@click.option("--tokens", default=128, show_default=True)
@click.option("--tiny", is_flag=True, help="The tiny random model instead of SmolLM2.")
@click.option("--out", default="demo", type=click.Path(path_type=Path), show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(steps: int, tokens: int, tiny: bool, out: Path, path: Path | None) -> None:
    seconds = measured(out, tiny, steps, tokens)
    share = sum(seconds["counting"]) / sum(seconds["step"])
    result = {
        "what": "counters on every step of the demo, nothing recorded",
        "steps": len(seconds["step"]),
        "tokens": tokens,
        "median_step_seconds": round(statistics.median(seconds["step"]), 4),
        "median_counting_ms": round(statistics.median(seconds["counting"]) * 1e3, 3),
        "highest_counting_ms": round(max(seconds["counting"]) * 1e3, 3),
        "share_of_step": round(share, 6),
    }
    write_result(result, path)
    if share > LIMIT:
        raise SystemExit(f"counting takes {share:.2%} of a step; at most {LIMIT:.0%} was promised")
