"""Measure what ``memprof --help`` costs and loads, and what the plugin costs TensorBoard when it starts.

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
# Seconds that TensorBoard waits for the plugin when it starts; TensorBoard's own modules are loaded before.
PLUGIN = """
import time
from types import SimpleNamespace
from tensorboard import default, program
from tensorboard.plugins import base_plugin
start = time.perf_counter()
from memprof.integrations.board.loader import MemoryTabLoader
plugin = MemoryTabLoader().load(SimpleNamespace(logdir="/nonexistent", flags=None))
plugin.frontend_metadata(); plugin.get_plugin_apps(); plugin.is_active()
print(time.perf_counter() - start)
"""
MUST_NOT_LOAD = ("torch", "plotly", "rich", "numpy", "msgspec", "transformers", "trl")


def timed(code: str) -> dict[str, float]:
    """Return wall and CPU seconds of a fresh interpreter running ``code``."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=dict(os.environ))
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall": wall, "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def plugin_seconds() -> float:
    """Return the wall seconds that the plugin adds to TensorBoard's start."""
    done = subprocess.run([sys.executable, "-c", PLUGIN], capture_output=True, text=True, check=True)
    return float(done.stdout)


@click.command(help=__doc__)
@click.option("--rounds", default=15, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(rounds: int, path: Path | None) -> None:
    results = interleaved({"empty": lambda: timed("pass"), "help": lambda: timed(HELP)}, rounds)
    loaded = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    plugin = statistics.median(plugin_seconds() for _ in range(rounds))
    modules = set(loaded.stdout.splitlines()[-1].split())
    write_result(
        {
            "what": "memprof --help against python -c pass",
            "rounds": rounds,
            "help_wall_seconds": round(statistics.median(r["wall"] for r in results["help"]), 4),
            "empty_wall_seconds": round(statistics.median(r["wall"] for r in results["empty"]), 4),
            "wall_ratio": round(ratio(results, "help", "empty", "wall"), 2),
            "cpu_ratio": round(ratio(results, "help", "empty", "cpu"), 2),
            "tensorboard_plugin_wall_seconds": round(plugin, 4),
            "loaded_but_should_not": sorted(modules.intersection(MUST_NOT_LOAD)),
        },
        path,
    )
