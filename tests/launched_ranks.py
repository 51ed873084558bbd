"""Run a module of the tests in two gloo processes, and read what each rank found."""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

from tests.forked import server

__all__ = ["found_by_two_ranks", "write_and_leave"]

_ROOT = Path(__file__).resolve().parents[1]
_SECONDS = 600


def found_by_two_ranks(module: str, folder: Path, *arguments: str) -> list[Any]:
    """Run ``module FOLDER ARGUMENTS`` on two ranks; return what is in ``rank-0.json`` and ``rank-1.json`` then.

    Each rank is a process of its own with the environment that torchrun gives it, forked from one that has imported the
    trainers and done nothing else: that import takes longer than what most ranks do. Real launchers start
    ``tests/integrations/test_ranks.py`` and ``tests/watch/test_faults.py``.
    """
    port = _free_port()
    logs = [folder / f"rank-{rank}.log" for rank in range(2)]
    words = (str(folder), *arguments)
    ranks = [
        server().Process(target=_rank, args=(rank, port, logs[rank], dict(os.environ), module, words))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        _wait_for_all(ranks)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    said = "\n".join(log.read_text(errors="replace")[-4000:] for log in logs if log.exists())
    assert [process.exitcode for process in ranks] == [0, 0], said
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def _wait_for_all(ranks: list[Any]) -> None:
    """Return when all have ended, when one has failed (the other would wait for it), or when time is up."""
    until = time.monotonic() + _SECONDS
    running = list(ranks)
    while running and time.monotonic() < until and not any(process.exitcode for process in ranks):
        wait([process.sentinel for process in running], timeout=until - time.monotonic())
        running = [process for process in running if process.exitcode is None]


def _rank(
    rank: int, port: int, log: Path, environment: dict[str, str], module: str, arguments: tuple[str, ...]
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(_ROOT)
    os.environ.clear()
    os.environ.update(
        environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
