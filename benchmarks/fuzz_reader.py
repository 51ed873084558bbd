"""Coverage-guided fuzzing of the snapshot reader and the timeline (needs ``pip install atheris``).

    python benchmarks/fuzz_reader.py --seconds 600 [--corpus FOLDER]

Every input must be used, or refused with one of memprof's own errors, within memory and time. The
corpus starts from ``tests/snapshot/corpus`` and grows in a temporary folder (or in FOLDER).
Prints how many inputs were tried; exits with an error at the first one that breaks the rule.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEEDS = ROOT / "tests" / "snapshot" / "corpus"


def main() -> None:
    """Command line; libFuzzer ends the process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    try:
        import atheris
    except ImportError:
        sys.exit("atheris is not installed: pip install atheris")
    with atheris.instrument_imports(include=["memprof"]):
        from tests.snapshot.exercise import survives

    folder = options.corpus or Path(tempfile.mkdtemp(prefix="memprof-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    limits = [f"-max_total_time={options.seconds}", "-max_len=8192", "-timeout=20", "-rss_limit_mb=1500"]
    artifacts = f"-artifact_prefix={folder}/broken-"
    atheris.Setup([sys.argv[0], *limits, artifacts, "-print_final_stats=1", str(folder), str(SEEDS)], survives)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
