"""Run the checks that need a GPU, one JSON line each.

    python -m benchmarks.gpu.run [--only callback] [--out benchmarks/results/h200]

Each check can be run alone and is meant to end within ten minutes. Models are built from their configs with random
weights, so nothing is downloaded. ``--tiny`` runs small models on whatever is there: it shows that the script works.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu.checks import CHECKS
from benchmarks.measure import environment


def device() -> dict[str, Any]:
    """Return the GPU, its driver's memory figure, and the CUDA that torch was built with."""
    import torch

    if not torch.cuda.is_available():
        return {"device": "cpu"}
    found = torch.cuda.get_device_properties(0)
    return {"device": found.name, "total_bytes": found.total_memory, "cuda": torch.version.cuda}


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice(list(CHECKS)))
@click.option("--out", type=click.Path(path_type=Path), help="Folder for one JSON file a check.")
@click.option("--tiny", is_flag=True, help="Small models on any machine: a check of the script, not of a GPU.")
def main(only: tuple[str, ...], out: Path | None, tiny: bool) -> None:
    where = device()
    if where["device"] == "cpu" and not tiny:
        sys.exit("No GPU was found. --tiny runs the script on the CPU with small models.")
    for name in only or CHECKS:
        began = time.monotonic()
        result = {"check": name, "tiny": tiny, **where, **CHECKS[name](tiny)}
        result |= {"wall_seconds": round(time.monotonic() - began, 1), "environment": environment()}
        print(json.dumps(result), flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
