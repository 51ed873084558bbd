"""Commands and ranks in processes forked from one that has imported the trainers, which takes longer than most of them.

Nothing of memprof is imported there: a command finds it as in a process of its own. Real processes stand in
``tests/simulate/test_fast_start.py``, ``tests/plan/test_subprocess_runner.py`` and ``tests/instrument``.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import runpy
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import IO, Any, NoReturn

_ROOT = Path(__file__).resolve().parents[1]
_SECONDS = 600


def _server() -> Any:
    """Return the context whose processes are forked from one with the trainers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trl.trainer.grpo_trainer", "trl.trainer.sft_trainer", "peft"])
    return context


def run(arguments: Sequence[str], folder: Path, environment: Mapping[str, str], streams: Mapping[int, Any]) -> None:
    """Be ``python ARGUMENTS``: in a process that was forked for it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND  # two streams may share a file
    for number, stream in streams.items():
        os.dup2(stream.fileno() if isinstance(stream, Connection) else os.open(stream, flags), number)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    what, *words = arguments
    try:
        if what == "-m":
            sys.path.insert(0, str(folder))
            sys.argv = words
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str((folder / what).parent))
            sys.argv = [what, *words]
            runpy.run_path(what, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def python(arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> CompletedProcess[str]:
    """Run ``python -m MODULE ...`` or ``python FILE ...`` to its end; its standard input is not there."""
    with TemporaryDirectory() as folder:
        texts = [Path(folder, name) for name in ("stdout", "stderr")]
        streams = {0: os.devnull, 1: str(texts[0]), 2: str(texts[1])}
        process = _server().Process(target=run, args=(arguments, cwd, dict(environment), streams))
        process.start()
        process.join(_SECONDS)
        process.kill()
        process.join()
        said = [text.read_text(encoding="utf-8") for text in texts]
    return CompletedProcess([sys.executable, *arguments], process.exitcode, *said)


class Worker:
    """As much of ``subprocess.Popen`` as ``memprof.plan.subprocess_runner`` needs, for a worker that is forked."""

    stdin: IO[str]
    stdout: IO[str]

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> None:
        (questions, asking), (answering, answers) = (multiprocessing.Pipe(duplex=False) for _ in range(2))
        with questions, asking, answering, answers, Connection(os.dup(2)) as errors:
            streams = {0: questions, 1: answers, 2: errors}
            asked = (command[1:], Path.cwd(), dict(env), streams)
            self._process = _server().Process(target=run, args=asked, daemon=True)
            self._process.start()
            self.stdin = os.fdopen(os.dup(asking.fileno()), "w", encoding="utf-8")
            self.stdout = os.fdopen(os.dup(answering.fileno()), encoding="utf-8")

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int | None:
        self._process.join()
        code: int | None = self._process.exitcode
        return code


# -- ranks -------------------------------------------------------------------------------------------------------------


def found_by_two_ranks(module: str, folder: Path, *arguments: str) -> list[Any]:
    """Run ``module FOLDER ARGUMENTS`` on two ranks; return what is in ``rank-0.json`` and ``rank-1.json`` then.

    Each rank has the environment that torchrun gives it. Real launchers start ``tests/integrations/test_ranks.py`` and
    ``tests/instrument/test_faults.py``.
    """
    port = _free_port()
    logs = [folder / f"rank-{rank}.log" for rank in range(2)]
    words = ("-m", module, str(folder), *arguments)
    given = {
        **os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    ranks = []
    for rank, log in enumerate(map(str, logs)):
        environment = {**given, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        streams = {0: os.devnull, 1: log, 2: log}
        ranks.append(_server().Process(target=run, args=(words, _ROOT, environment, streams)))
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
