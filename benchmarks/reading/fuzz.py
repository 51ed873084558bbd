"""Fuzz the snapshot reader and the timeline, guided by coverage (needs ``pip install atheris``).

    python -m benchmarks.reading fuzz --seconds 600 [--corpus FOLDER]

Every input must be used, or refused with one of memprof's own errors, within memory and time. The
corpus starts from ``tests/snapshot/corpus`` and grows in a temporary folder (or in FOLDER).
Prints how many inputs were tried; exits with an error at the first one that breaks the rule.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from benchmarks.tabling import ROOT

SEEDS = ROOT / "tests" / "snapshot" / "corpus"


@click.command(help=__doc__)
@click.option("--seconds", default=60, show_default=True)
@click.option("--corpus", type=click.Path(path_type=Path), help="Where inputs are kept.")
def main(seconds: int, corpus: Path | None) -> None:
    try:
        import atheris
    except ImportError:
        sys.exit("atheris is not installed: pip install atheris")
    with atheris.instrument_imports(include=["memprof"]):
        from tests.snapshot.exercise import survives

    folder = corpus or Path(tempfile.mkdtemp(prefix="memprof-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    limits = [f"-max_total_time={seconds}", "-max_len=8192", "-timeout=20", "-rss_limit_mb=1500"]
    artifacts = f"-artifact_prefix={folder}/broken-"
    atheris.Setup([sys.argv[0], *limits, artifacts, "-print_final_stats=1", str(folder), str(SEEDS)], survives)
    atheris.Fuzz()  # ends the process
