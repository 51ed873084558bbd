"""``python -m benchmarks.truth --out DIR [--case NAME ...]``: run the cases, write snapshots with their truth."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.truth.cases import CASES, run_case
from benchmarks.truth.emit import Variant, replay, write
from benchmarks.truth.variants import to_length, variants_of


def _line(name: str, truth: dict[str, Any], seconds: float) -> str:
    peak = truth["peak"]
    total = peak["allocated_bytes"]
    parts = ", ".join(f"{k} {100 * v / total:.1f}%" for k, v in peak["by_category"].items() if v > 0.004 * total)
    size = f"{truth['entries']} entries, peak {total / 2**30:.2f} GiB in {peak['phase']}"
    return f"{name}: {size} ({parts}) [{seconds:.0f} s]"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", action="append", choices=sorted(CASES))
    parser.add_argument("--variants", action="store_true", help="the derived recordings of each run too")
    parser.add_argument("--layers", type=int, help="fewer layers (quick)")
    parser.add_argument("--events", type=int, help="also one with this many entries: the last step played again")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.simplefilter("ignore")
    for name in args.case or list(CASES):
        start = time.time()
        stream, about = run_case(CASES[name], args.layers)
        for variant, altered in variants_of(name, stream, args.variants):
            snapshot, truth = replay(altered, variant, about)
            write(args.out, f"{name}.{variant.name}", snapshot, truth)
            print(_line(f"{name}.{variant.name}", truth, time.time() - start), file=sys.stderr)
        if args.events:
            stream = to_length(stream, args.events)
            snapshot, truth = replay(stream, Variant(f"{args.events}_events"), about)
            write(args.out, f"{name}.{truth['variant']}", snapshot, truth)
            print(_line(f"{name}.{truth['variant']}", truth, time.time() - start), file=sys.stderr)
        if about.get("guessed_extents"):
            print(f"  extents not recognised by meaning: {about['guessed_extents']}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
