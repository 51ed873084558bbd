"""Run a module of the tests in two gloo processes, and read what each rank found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["found_by_two_ranks", "write_and_leave"]

_ROOT = Path(__file__).resolve().parents[1]


def found_by_two_ranks(module: str, folder: Path, *arguments: str) -> list[Any]:
    """Run ``module FOLDER ARGUMENTS`` under torchrun; return what is in ``rank-0.json`` and ``rank-1.json`` then."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        "-m", module, str(folder), *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def write_and_leave(folder: Path, found: Any) -> NoReturn:
    """Write this rank's ``rank-N.json`` and end its process, without taking the interpreter down.

    Gloo's threads may still hold tensors of the last collective, and abort the process where they let go of them while
    Python ends ("terminate called without an active exception"; pytorch/pytorch#179291). Sharded modules keep the group
    and so its threads, ``destroy_process_group`` or not.
    """
    import torch.distributed as dist

    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
