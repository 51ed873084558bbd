"""Train SmolLM2-135M on GSM8K with TRL's trainer and the lean trainer, and compare them step by step.

    python -m benchmarks.lean track [--steps 20] [--json FILE]

TRL trains first and its completions are kept; the lean trainer starts from the same weights and trains on them: losses,
rewards and gradient norms side by side. Each generation batch is used twice (``num_iterations=2``), so that losses are
not near zero.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.lean.real_model import JSON, OUT, TINY, build, prepared
from benchmarks.measure import write_result

COMPARED = ("loss", "reward", "reward_std", "grad_norm", "kl", "entropy")


def track(model: str, questions: Any, folder: Path, steps: int, lora: bool, **settings: Any) -> dict[str, Any]:
    """Train both on the same completions; return their steps, seconds and largest difference."""
    import torch

    kept: list[Any] = []
    runs: dict[str, Any] = {}
    for kind in ("trl", "lean"):
        trainer = build(kind, model, questions, folder, lora, max_steps=steps, num_iterations=2, **settings)
        generate = trainer._generate_single_turn

        def record(*args: Any, generate: Any = generate, **kwargs: Any) -> Any:
            found = generate(*args, **kwargs)
            kept.append((found, torch.get_rng_state()))
            return found

        waiting = iter(list(kept))

        def replay(*_: Any, waiting: Any = waiting, **__: Any) -> Any:
            found, state = next(waiting)
            torch.set_rng_state(state)
            return found

        trainer._generate_single_turn = record if kind == "trl" else replay
        seconds = training_seconds(trainer)
        trainer.train()
        rows = [row for row in trainer.state.log_history if "loss" in row]
        runs[kind] = {"steps": [{name: row.get(name) for name in COMPARED} for row in rows], "seconds": list(seconds)}
        del trainer, generate
        gc.collect()
    return {**runs, "largest_difference": difference(runs)}


def difference(runs: dict[str, Any]) -> dict[str, float]:
    """Find the largest distance of any step, relative to the run's largest value; without what neither run logged."""
    found = {}
    for name in COMPARED:
        pairs = [(a[name], b[name]) for a, b in zip(runs["trl"]["steps"], runs["lean"]["steps"], strict=True)]
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        if any((a is None) != (b is None) for a, b in pairs):
            found[name] = float("inf")  # one of them did not log it
        elif both:
            scale = max(abs(a) for a, _ in both) or 1.0
            found[name] = max(abs(a - b) for a, b in both) / scale
    return found


def training_seconds(trainer: Any) -> list[float]:
    """Time each training step without generation and scoring; the list fills while it trains."""
    found: list[float] = []
    away = [0.0]
    step, prepare = trainer.training_step, trainer._prepare_inputs

    def timed_prepare(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = prepare(*args, **kwargs)
        away[0] = time.perf_counter() - start
        return result

    def timed_step(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = step(*args, **kwargs)
        found.append(time.perf_counter() - start - away[0])
        return result

    trainer._prepare_inputs, trainer.training_step = timed_prepare, timed_step
    return found


@click.command(help=__doc__)
@click.option("--steps", default=20)
@click.option("--lora", is_flag=True)
@click.option("--completions", default=4)
@click.option("--tokens", default=32, help="Tokens of a completion.")
@OUT
@JSON
@TINY
def main(
    steps: int, lora: bool, completions: int, tokens: int, out: Path, json_path: Path | None, tiny: bool
) -> None:
    model, questions, note = prepared(out, tiny)
    settings = {
        "per_device_train_batch_size": completions,
        "num_generations": completions,
        "max_completion_length": tokens,
    }
    found = track(model, questions, out / "_work" / "lean", steps, lora, **settings)
    write_result({"model": note, "lora": lora, "settings": settings, **found}, json_path)
