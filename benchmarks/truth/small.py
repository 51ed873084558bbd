"""Run small trainings of many kinds, label every allocation by tensor identity, and score attribution on them.

    python -m benchmarks.truth small --out DIR [--half first|second] [NAME ...]

The programs (``scripts/small_trainings.py``) were written before any rule was changed for them, and split by a coin.
"""

from __future__ import annotations

import random
from pathlib import Path

import click

from benchmarks.truth.replay.emit import Stream, Variant, build_stream, replay, write
from benchmarks.truth.zoo.run import report_half

_CRITICS = ("Critic",)
_WIDTHS = (192, 320, 160, 256)


def halves() -> dict[str, list[str]]:
    """Return the programs' names by half."""
    from benchmarks.truth.scripts.small_trainings import PROGRAMS

    names = sorted(PROGRAMS)
    random.Random(4242).shuffle(names)
    return {"first": names[:8], "second": names[8:]}


def run_small(name: str) -> Stream:
    """Run a program under the tracer and return its labelled stream."""
    import torch

    from benchmarks.truth.scripts import small_trainings
    from benchmarks.truth.zoo.tracing import RealScale, trace_program

    torch.manual_seed(0)
    held: list[object] = []
    tracer = trace_program(lambda tracer: held.append(small_trainings.main(name, tracer)), _CRITICS)  # type: ignore[no-untyped-call]
    return build_stream(tracer, RealScale((small_trainings.WORDS,), _WIDTHS))


def record_small(name: str, out: Path) -> list[Path]:
    """Write a program's recordings, complete and from the first pass on, with their truth."""
    stream = run_small(name)
    variants = (Variant(), Variant("after_load", after_load=True))
    for variant in variants:
        snapshot, truth = replay(stream, variant, {"run": name, "model": name, "about": name})
        write(out, f"{name}.{variant.name}", snapshot, truth)
    return [out / f"{name}.{variant.name}.pickle" for variant in variants]


@click.command(help=__doc__)
@click.argument("names", nargs=-1, metavar="[NAME ...]")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the labelled recordings.")
@click.option("--half", type=click.Choice(["first", "second"]), help="Only this half.")
@click.option("--confusion", is_flag=True, help="Print what was mistaken for what.")
def main(names: tuple[str, ...], out: Path, half: str | None, confusion: bool) -> None:
    for which, programs in halves().items():
        chosen = [name for name in programs if half in (None, which) and (not names or name in names)]
        report_half(which, [path for name in chosen for path in record_small(name, out)], confusion)
