"""Simulations in a process of their own, for a program that must not notice: no fork, no import of its main module.

One process serves many; it takes a JSON line of settings and answers with a JSON line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import TracebackType
from typing import IO, Any

from memprof.config.settings import Settings
from memprof.errors import InputError, MemprofError, UsageError

__all__ = ["Apart"]

# A launcher's: the other process is no rank of this run, and needs no GPU.
_NOT_PASSED_ON = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "MEMPROF",
)  # fmt: skip
_PREFIXES = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "PARALLELISM_CONFIG_", "DEEPSPEED_")


class Apart:
    """A context whose :meth:`run` simulates settings elsewhere.

    Args:
        gpu: as ``--gpu``; None judges nothing.
    """

    def __init__(self, gpu: str | None) -> None:
        self._gpu = gpu
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Apart:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if kind is not None:
            process.kill()
        process.communicate()

    def run(self, wanted: list[Settings]) -> list[dict[str, Any]]:
        """Rows in the order of ``wanted``, remembered between runs as those of ``memprof plan``.

        Raises:
            InputError, UsageError: one cannot be simulated.
        """
        return [self._row(settings) for settings in wanted]

    def _row(self, settings: Settings) -> dict[str, Any]:
        from memprof.config.catalogue import find_config
        from memprof.plan import cache

        key = cache.key_of(settings.to_dict(), find_config(settings.model), self._gpu)
        if (known := cache.load(key)) is not None:
            return known
        row = self._ask({"settings": settings.to_dict(), "gpu": self._gpu})
        cache.store(key, row)
        return row

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._process = _start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise InputError(f"the process that simulates ended by itself (exit code {process.wait()}).")
        answer = json.loads(line)
        if "error" in answer:
            raise (UsageError if answer["exit_code"] == UsageError.exit_code else InputError)(answer["error"])
        row: dict[str, Any] = answer["row"]
        return row


def _start() -> subprocess.Popen[str]:
    kept = {n: v for n, v in os.environ.items() if n not in _NOT_PASSED_ON and not n.startswith(_PREFIXES)}
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-m", "memprof.plan.apart"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**kept, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "MEMPROF": "0"},
    )


def _serve(questions: IO[str], answers: IO[str]) -> None:
    from memprof.simulate.fit import run_row

    for line in questions:
        question = json.loads(line)
        try:
            answer: dict[str, Any] = {"row": run_row(question["settings"], question["gpu"])}
        except MemprofError as error:
            answer = {"error": str(error), "exit_code": error.exit_code}
        except Exception as error:  # of any library: told in a sentence, and the next question is served
            what = f"cannot be simulated ({type(error).__name__}: {str(error).partition(chr(10))[0][:160]})."
            answer = {"error": f"this run {what}", "exit_code": InputError.exit_code}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _main() -> None:
    # What libraries print must not come between answers.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        _serve(sys.stdin, answers)


if __name__ == "__main__":
    _main()
