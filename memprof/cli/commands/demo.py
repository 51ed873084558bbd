"""``memprof demo``: a small real GRPO run on this machine, profiled and reported."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="demo")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("demo"), show_default=True, metavar="DIR",
    help="Write pages, tables and snapshots to DIR.",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="Train a tiny random model on short answers: seconds instead of minutes.")
def command(out: Path, quick: bool) -> None:
    """Train a small model with GRPO, fully and then with LoRA, under memprof, and write a report of each run.

    Needs TRL (pip install '.[trl]' in a checkout of memprof) and no GPU.
    """
    from memprof.demo import run

    run(out, quick=quick)
