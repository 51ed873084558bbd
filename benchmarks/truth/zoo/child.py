"""Run one program of the zoo in this process, and write its recordings with the truth beside them.

python -m benchmarks.truth.zoo.child NAME CHECKOUT OUT
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

from benchmarks.truth.zoo.rows import Row, read_rows


def run(row: Row, checkout: Path, out: Path) -> None:
    """Run ``row``'s program in ``checkout`` and write ``NAME.normal`` and ``NAME.after_load`` under ``out``."""
    import numpy as np
    import torch

    from benchmarks.truth.replay.emit import Variant, build_stream, replay, write
    from benchmarks.truth.zoo import programs
    from benchmarks.truth.zoo.tracing import RealScale, trace_program

    torch.set_num_threads(1)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    prepare = getattr(programs, row.name.replace("-", "_"))

    def main(tracer: Any) -> None:
        prepare(checkout, tracer)

    with programs.without_a_gpu():
        tracer = trace_program(main, row.value_models)
    about = {"run": row.name, "model": row.repository, "about": row.style}
    stream = build_stream(tracer, RealScale(row.vocabulary, row.hidden))
    for variant in (Variant(), Variant("after_load", after_load=True)):
        snapshot, truth = replay(stream, variant, about)
        write(out, f"{row.name}.{variant.name}", snapshot, truth)


if __name__ == "__main__":
    name, checkout, out = sys.argv[1:4]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    target = Path(out).resolve()
    sys.argv = [name]
    run(read_rows()[name], Path(checkout).resolve(), target)
