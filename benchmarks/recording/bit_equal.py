"""Train the demo's runs with and without the callback and compare them bit for bit.

python -m benchmarks.recording bit-equal [--out demo] [--tiny] [--json FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import write_result


def compare(recipe: Any, out: Path, tiny: bool) -> dict[str, Any]:
    """Train once unwatched and once watched, from the same seed, and compare."""
    from memprof import MemProfCallback
    from memprof.demo.data import load_questions
    from memprof.demo.model import prepare_checkpoint
    from memprof.demo.training import Scale, train

    checkpoint = prepare_checkpoint(out / "_model", tiny=tiny)
    scale = Scale(completion_tokens=24) if tiny else Scale()
    questions = load_questions(8).items
    work = out / "_work" / "bit_equal"
    plain = train(recipe, scale, checkpoint, questions, work)
    watched = train(recipe, scale, checkpoint, questions, work, [MemProfCallback(output_dir=work, report=False)])
    return {
        "run": recipe.name,
        "model": checkpoint.note,
        "steps": scale.steps,
        "reward_std": plain.reward_stds,
        "tensors_moved": plain.moved,
        "proves_something": plain.learned,
        "recorded": len(list(work.glob("*.pickle"))),
        "metrics_equal": plain.metrics == watched.metrics,
        "parameters_equal": plain.parameters == watched.parameters,
    }


@click.command(help=__doc__)
@click.option("--out", default="demo", type=click.Path(path_type=Path), show_default=True)
@click.option("--tiny", is_flag=True, help="The tiny random model instead of SmolLM2.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(out: Path, tiny: bool, path: Path | None) -> None:
    from memprof.demo.training import FULL, LORA

    runs = [compare(recipe, out, tiny) for recipe in (FULL, LORA)]
    write_result({"what": "training with the callback against without", "runs": runs}, path)
    must = ("proves_something", "recorded", "metrics_equal", "parameters_equal")
    sys.exit(0 if all(run[key] for run in runs for key in must) else 1)
