"""Simulate the training peak of SmolLM2-135M with LoRA at many lengths: the lean trainer, and TRL's at its leanest.

    python -m benchmarks.lean lengths [--length N ...] [--json FILE]

Eight sequences, a quarter of each the prompt. TRL's trainer has all eight in a micro-batch (its default here), or one
with eight accumulated, which is the least it can hold; the lean trainer has its defaults. Peaks are of allocated bytes
outside generation: on ``cuda`` of a simulated GPU, on ``cpu`` of the tensor trace of torch's CPU paths.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from benchmarks.lean.memory import TUNED, simulated, training_bytes
from benchmarks.tabling import RESULTS

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
TRAINERS: dict[str, dict[str, Any]] = {"trl": {}, "trl, micro-batch 1": TUNED, "lean": {"recipe": "lean"}}
_MODEL = {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "lora_r": 16}


def case(trainer: str, length: int, device: str) -> dict[str, Any]:
    """Describe a run of sequences of ``length`` tokens."""
    prompt = length // 4
    return {**_MODEL, **TRAINERS[trainer], "prompt_length": prompt, "completion_length": length - prompt,
            "device": device}  # fmt: skip


def peaks(length: int, device: str) -> dict[str, int]:
    """Return each trainer's training peak in bytes."""
    return {name: training_bytes(simulated(case(name, length, device), warmed_up=True)) for name in TRAINERS}


@click.command(help=__doc__)
@click.option("--length", "lengths", type=int, multiple=True, default=LENGTHS, show_default=True)
@click.option("--device", "devices", type=click.Choice(["cuda", "cpu"]), multiple=True, default=("cuda", "cpu"))
@click.option("--json", "path", type=click.Path(path_type=Path), default=RESULTS / "lean_lengths.json")
def main(lengths: tuple[int, ...], devices: tuple[str, ...], path: Path) -> None:
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for device in devices:
        for length in lengths:
            found = peaks(length, device)
            known[f"{device}, {length}"] = {"device": device, "length": length, "peak_bytes": found}
            share = found["lean"] / found["trl, micro-batch 1"]
            print(f"{device}, {length}: {', '.join(f'{n} {b / 1e6:.1f} MB' for n, b in found.items())}; {share:.2f}")
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
