"""Generate a long run's completions on an emulated GPU: does it fit, what is allocated, what is reserved.

    python -m benchmarks.simulator emulated-generation [--model ID] [--GPU NAME] [--sequences N] [--log FILE]

Only ``generate`` of the lean trainer runs, with LoRA, at its full length, and no operator computes values: thousands of
decoding steps through the real allocator take minutes, at 8B and 20,480 tokens about half an hour of a free core. What
its allocator counted is written to ``benchmarks/results/emulated-cuda/generation.json``. ``--log`` adds the counters to
a file every twenty seconds.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from memprof.config.settings import Settings

_CHILD = "benchmarks.simulator.emulated.generation"
_EVERY_S = 20.0
_COUNTERS = ("allocated_bytes", "reserved_bytes", "retries", "ooms")


@click.command(help=__doc__)
@click.option("--model", default="meta-llama/Llama-3.1-8B-Instruct", show_default=True)
@click.option("--card", default="RTX 4090", show_default=True)
@click.option("--sequences", default=2, show_default=True)
@click.option("--prompt-length", default=512, show_default=True)
@click.option("--completion-length", default=19_968, show_default=True)
@click.option("--log", type=click.Path(path_type=Path), help="A file of JSON lines.")
def main(
    model: str, card: str, sequences: int, prompt_length: int, completion_length: int, log: Path | None
) -> None:
    from benchmarks.simulator.emulated.device import ask
    from benchmarks.simulator.emulated.matrix import RESULTS

    settings = Settings(
        model=model, dtype="bfloat16", recipe="lean", lora_r=16, per_device_train_batch_size=sequences,
        num_generations=sequences, prompt_length=prompt_length, completion_length=completion_length, attn="auto",
    )  # fmt: skip
    question = {"settings": settings.to_dict(), "log": str(log.resolve()) if log else None}
    found = ask(_CHILD, question, card, values=False, timeout=6 * 3600)
    run = {"model": model, "card": card, "sequences": sequences, "prompt_length": prompt_length,
           "completion_length": completion_length}  # fmt: skip
    text = json.dumps({"run": run, "origin": "python -m benchmarks.simulator emulated-generation", **found}, indent=1)
    (RESULTS / "generation.json").write_text(text + "\n")
    print(text)


def generate_here(question: dict[str, Any]) -> dict[str, Any]:
    """Generate on the device that is here; what its allocator counted at its highest, in bytes."""
    import torch

    from benchmarks.simulator.emulated.device_run import build, counted
    from memprof.compat import trl as names

    settings = Settings.from_dict(question["settings"])
    begun, error = time.monotonic(), None
    with tempfile.TemporaryDirectory() as folder, _never_padded_or_finished(settings) as count:
        trainer = build(settings, False, folder)
        prompts = [[0] * settings.prompt_length for _ in range(settings.per_device_train_batch_size)]
        with _logging(question["log"], count):
            try:
                with torch.no_grad():
                    names.GENERATE_SINGLE_TURN.of(trainer)(prompts, None, {}, num_generations=settings.num_generations)
            except torch.OutOfMemoryError as problem:
                error = str(problem).partition("\n")[0]
    return {"fits": error is None, "error": error, "seconds": round(time.monotonic() - begun), **counted(_COUNTERS)}


@contextlib.contextmanager
def _never_padded_or_finished(settings: Settings) -> Iterator[list[int]]:
    """Answer the two questions that need values, while open; yields ``[tokens so far of each sequence]``."""
    from memprof.compat import patching
    from memprof.compat import transformers as names

    is_all, count = names.MASK_IS_ALL.get(), [-1]

    def all_ones(tensor: Any) -> bool:
        bool(is_all(tensor))  # asked as it is, and answered as where nothing is padded
        return True

    def unfinished(*_: Any, **__: Any) -> bool:
        count[0] += 1
        if count[0] < settings.completion_length:
            return True
        count[0] = -1  # the next sequences, where not all generate at once
        return False

    with patching((names.MASK_IS_ALL, all_ones), (names.UNFINISHED, unfinished)):
        yield count


@contextlib.contextmanager
def _logging(file: str | None, count: list[int]) -> Iterator[None]:
    """Add the counters to a file every so often, while open."""
    from benchmarks.simulator.emulated.device_run import counted

    done, begun = threading.Event(), time.monotonic()

    def write() -> None:
        while file is not None and not done.wait(_EVERY_S):
            row = {"s": round(time.monotonic() - begun, 1), "tokens": count[0], **counted(_COUNTERS)}
            with Path(file).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    print(json.dumps(generate_here(json.loads(sys.stdin.read()))))
