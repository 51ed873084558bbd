"""Measure what watching costs on the demo: the tensor trace on a recorded step, and the callback without recording.

    python -m benchmarks.recording overhead [--rounds 3] [--tokens 128] [--tiny] [--out demo] [--json FILE]

Three ways of training the same two steps take turns: unwatched, with a callback that records nothing (phases and
counters only), and with one that records the second step. The runs are bit-equal, so the work is the same. A step's
time runs from before the recording starts until training has ended and the snapshot is written; CPU seconds are
compared too, because they suffer less from other programs.

What the callback costs without recording is less than the noise between two runs. So one more run is profiled: the
share of the step spent in memprof's own functions, which the profiler makes look slower than they are.
"""

from __future__ import annotations

import cProfile
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import interleaved, ratio, write_result

NEVER = 10**9  # a step no run of two reaches


def timer() -> tuple[Any, Any, dict[str, float]]:
    """Make callbacks to put first and last, and the place where they leave the seconds of the last step."""
    from transformers import TrainerCallback

    seconds: dict[str, float] = {}

    class First(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seconds["wall"], seconds["cpu"] = -time.perf_counter(), -time.process_time()

    class Last(TrainerCallback):
        def on_train_end(self, *_: Any, **__: Any) -> None:
            seconds["wall"] += time.perf_counter()
            seconds["cpu"] += time.process_time()

    return First(), Last(), seconds


def own_share(out: Path, tiny: bool, tokens: int, watch: Callable[[], list[Any]]) -> float:
    """Return the share of a profiled step's time that is spent in memprof's own functions."""
    import memprof.integrations
    from transformers import TrainerCallback

    folders = tuple(str(Path(m.__file__ or "").parent) for m in (memprof, memprof.integrations))
    profile = cProfile.Profile()

    class Start(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            profile.enable()

    class Stop(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            profile.disable()

    second_step(out, tiny, tokens, lambda: [Start(), *watch(), Stop()])
    times = [(str(getattr(e.code, "co_filename", "")), e.inlinetime) for e in profile.getstats()]
    ours = sum(t for file, t in times if file.startswith(folders) and "/demo/" not in file)
    return ours / sum(t for _, t in times)


def second_step(out: Path, tiny: bool, tokens: int, watch: Callable[[], list[Any]]) -> dict[str, float]:
    """Return wall and CPU seconds of the second of two steps."""
    from memprof.demo.data import load_questions
    from memprof.demo.model import prepare_checkpoint
    from memprof.demo.training import FULL, Scale, train

    first, last, seconds = timer()
    scale = Scale(completion_tokens=tokens)
    checkpoint = prepare_checkpoint(out / "_model", tiny=tiny)
    callbacks = [first, *watch(), last]
    trained = train(FULL, scale, checkpoint, load_questions(8).items, out / "_work" / "overhead", callbacks)
    assert trained.learned, "the run trained nothing, so its timing means nothing"
    return dict(seconds)


@click.command(help=__doc__)
@click.option("--rounds", default=3, show_default=True)
@click.option("--tokens", default=128, show_default=True)
@click.option("--tiny", is_flag=True, help="The tiny random model instead of SmolLM2.")
@click.option("--out", default="demo", type=click.Path(path_type=Path), show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(rounds: int, tokens: int, tiny: bool, out: Path, path: Path | None) -> None:
    from memprof import MemProfCallback

    records = out / "_work" / "overhead"
    watch: dict[str, Callable[[], list[Any]]] = {
        "unwatched": list,
        "watched": lambda: [MemProfCallback(output_dir=records, report=False, steps=[NEVER])],
        "recorded": lambda: [MemProfCallback(output_dir=records, report=False, steps=[2])],
    }
    second_step(out, tiny, tokens, list)  # the first run of a process pays for imports and page faults
    tasks = {name: lambda w=make: second_step(out, tiny, tokens, w) for name, make in watch.items()}
    results = interleaved(tasks, rounds)
    share = own_share(out, tiny, tokens, watch["watched"])
    facts = {"what": "the demo's second step", "tokens": tokens, "rounds": rounds, "watched_own_share": round(share, 6)}
    write_result({**facts, **summary(results)}, path)


def summary(results: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return ratios to the unwatched step of the same round, and the seconds they come from."""
    medians = {
        name: {key: round(statistics.median(run[key] for run in runs), 2) for key in ("wall", "cpu")}
        for name, runs in results.items()
    }
    ratios = {
        f"{name}_{key}_ratio": round(ratio(results, name, "unwatched", key), 3)
        for name in ("watched", "recorded")
        for key in ("wall", "cpu")
    }
    return {**ratios, "median_seconds": medians}
