"""``memprof demo``: a small real GRPO run on this machine, profiled and reported."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["command"]


@click.command(name="demo", short_help="Train a small model with GRPO on this machine, profiled.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("demo"), show_default=True, metavar="DIR",
    help="Where the pages, tables and snapshots go.",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="A tiny random model and short answers: seconds instead of minutes.")
def command(out: Path, quick: bool) -> None:
    """Train a small model with GRPO, fully and then with LoRA, under memprof, and write what it says about each run.

    Needs no GPU. Needs torch, transformers, TRL and PEFT: pip install 'grpo-memprof[trl]'.
    """
    from memprof.demo import run

    run(out, quick=quick)
