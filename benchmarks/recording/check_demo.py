"""Hold the files of ``make demo`` to closed forms; exit code 1 if one of them fails.

python -m benchmarks.recording check-demo [demo]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from memprof import analyze
from memprof.demo.training import Scale
from tests.closed_forms import Check, checks, facts_of


def check_run(out: Path, name: str) -> list[Check]:
    """Check every statement about ``<out>/<name>.json`` and ``.pickle``."""
    trained = json.loads((out / f"{name}.training.json").read_text(encoding="utf-8"))
    report = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    facts = facts_of(
        out / trained["checkpoint"],
        trained["metrics"],
        step=report["peak"]["step"],
        lora=name == "lora",
        scale=Scale(**trained["scale"]),
    )
    return list(checks(analyze(out / f"{name}.pickle"), report, facts))


@click.command(help=__doc__)
@click.argument("out", default="demo", type=click.Path(path_type=Path))
def main(out: Path) -> None:
    failed = 0
    for name in ("full", "lora"):
        print(f"{name}:")
        for check in check_run(out, name):
            print(f"  {check}")
            failed += not check.holds
    print(f"{failed} failed" if failed else "all hold")
    sys.exit(min(failed, 1))
