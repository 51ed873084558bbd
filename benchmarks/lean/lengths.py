"""Simulate the training peak of SmolLM2-135M with LoRA at many lengths: the lean trainer, and TRL's at its leanest.

    python -m benchmarks.lean lengths [--length N ...] [--traced N ...] [--json FILE]

Eight sequences, a quarter of each the prompt. TRL's trainer has all eight in a micro-batch (its default here), or one
with eight accumulated, which is the least it can hold; the lean trainer has its defaults. Peaks are of allocated bytes
outside generation: on ``cuda`` of a simulated GPU, on ``cpu`` of the tensor trace of torch's CPU paths. ``--traced``
trains one real micro-batch of four sequences on a CPU in fp32 and records its tensors: no generation, no optimizer.
"""

from __future__ import annotations

import gc
import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.lean.memory import TUNED, simulated, training_bytes
from benchmarks.lean.real_model import OUT, TINY, build, prepared
from benchmarks.lean.speed import LEAST, micro_batch, peak, step
from benchmarks.tabling import RESULTS

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
TRAINERS: dict[str, dict[str, Any]] = {"trl": {}, LEAST: TUNED, "lean": {"recipe": "lean"}}
_MODEL = {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "lora_r": 16}


def case(trainer: str, length: int, device: str) -> dict[str, Any]:
    """Describe a run of sequences of ``length`` tokens."""
    prompt = length // 4
    return {**_MODEL, **TRAINERS[trainer], "prompt_length": prompt, "completion_length": length - prompt,
            "device": device}  # fmt: skip


def peaks(length: int, device: str) -> dict[str, int]:
    """Return each trainer's training peak in bytes."""
    return {name: training_bytes(simulated(case(name, length, device), warmed_up=True)) for name in TRAINERS}


def traced(model: str, questions: Any, folder: Path, length: int) -> dict[str, int]:
    """Return the peaks of one real micro-batch in bytes: TRL's one row at a time, and the lean trainer's."""
    prompt = length // 4
    found: dict[str, int] = {}
    trainer: Any = None
    for kind, whose in ((LEAST, "trl"), ("lean", "lean")):
        trainer = inputs = None
        gc.collect()  # or the trainer before is traced too
        trainer = build(whose, model, questions, folder, True, beta=0.0)
        inputs = micro_batch(trainer.processing_class, questions, 4, True, prompt, length - prompt)
        if trainer.args.gradient_checkpointing and not trainer.model.is_gradient_checkpointing:
            trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        found[kind] = peak(partial(step, kind, trainer, inputs), trainer, folder)["total"]
    return found


@click.command(help=__doc__)
@click.option("--length", "lengths", type=int, multiple=True, default=LENGTHS, show_default=True)
@click.option("--device", "devices", type=click.Choice(["cuda", "cpu"]), multiple=True, default=("cuda", "cpu"))
@click.option("--traced", "real", type=int, multiple=True, help="A length to train for real and trace.")
@OUT
@TINY
@click.option("--json", "path", type=click.Path(path_type=Path), default=RESULTS / "lean_lengths.json")
def main(
    lengths: tuple[int, ...], devices: tuple[str, ...], real: tuple[int, ...], out: Path, tiny: bool, path: Path
) -> None:
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for device in () if real else devices:
        for length in lengths:
            _keep(known, path, device, length, peaks(length, device))
    if real:
        import torch

        torch.set_num_threads(1)
        model, questions, _ = prepared(out, tiny)
        for length in real:
            _keep(known, path, "traced", length, traced(model, questions, out / "_work" / "lengths", length))


def _keep(known: dict[str, Any], path: Path, device: str, length: int, found: dict[str, int]) -> None:
    known[f"{device}, {length}"] = {"device": device, "length": length, "peak_bytes": found}
    sizes = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in found.items())
    print(f"{device}, {length}: {sizes}; {found['lean'] / found[LEAST]:.3f}", flush=True)
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
