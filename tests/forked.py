"""Python commands in processes forked from one that has imported the trainers, which takes longer than most commands.

Nothing of memprof is imported there: a command finds it as in a process of its own. Real processes stand in
``tests/simulate/test_own_process.py``, ``tests/plan/test_subprocess_runner.py`` and ``tests/watch``.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import IO, Any

__all__ = ["Worker", "python", "server"]

_SECONDS = 600


def server() -> Any:
    """Return the context whose processes are forked from one with the trainers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trl.trainer.grpo_trainer", "trl.trainer.sft_trainer", "peft"])
    return context


def run(arguments: Sequence[str], folder: Path, environment: Mapping[str, str], streams: Mapping[int, Any]) -> None:
    """Be ``python ARGUMENTS``: in a process that was forked for it."""
    for number, stream in streams.items():
        os.dup2(stream.fileno() if isinstance(stream, Connection) else os.open(stream, os.O_RDWR | os.O_CREAT), number)
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
        process = server().Process(target=run, args=(arguments, cwd, dict(environment), streams))
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
            self._process = server().Process(target=run, args=asked, daemon=True)
            self._process.start()
            self.stdin = os.fdopen(os.dup(asking.fileno()), "w", encoding="utf-8")
            self.stdout = os.fdopen(os.dup(answering.fileno()), encoding="utf-8")

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int | None:
        self._process.join()
        code: int | None = self._process.exitcode
        return code

