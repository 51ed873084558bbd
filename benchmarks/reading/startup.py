"""Measure what ``memprof --help`` costs over an empty interpreter, and what it loads.

python -m benchmarks.reading startup [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click

from benchmarks.measure import interleaved, ratio, write_result

HELP = "import sys; sys.argv = ['memprof', '--help']; from memprof.cli import main; main()"
LOADED = """
import sys
from memprof.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
print(" ".join(sorted({name.split(".")[0] for name in sys.modules})))
"""
MUST_NOT_LOAD = ("torch", "plotly", "rich", "numpy", "msgspec", "transformers", "trl")


def timed(code: str) -> dict[str, float]:
    """Return wall and CPU seconds of a fresh interpreter running ``code``."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=dict(os.environ))
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall": wall, "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


@click.command(help=__doc__)
@click.option("--rounds", default=15, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(rounds: int, path: Path | None) -> None:
    results = interleaved({"empty": lambda: timed("pass"), "help": lambda: timed(HELP)}, rounds)
    loaded = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    modules = set(loaded.stdout.splitlines()[-1].split())
    write_result(
        {
            "what": "memprof --help against python -c pass",
            "rounds": rounds,
            "help_wall_seconds": round(statistics.median(r["wall"] for r in results["help"]), 4),
            "empty_wall_seconds": round(statistics.median(r["wall"] for r in results["empty"]), 4),
            "wall_ratio": round(ratio(results, "help", "empty", "wall"), 2),
            "cpu_ratio": round(ratio(results, "help", "empty", "cpu"), 2),
            "loaded_but_should_not": sorted(modules.intersection(MUST_NOT_LOAD)),
        },
        path,
    )
