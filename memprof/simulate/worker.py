"""Serve simulations to another process: ``python -m memprof.simulate.worker``.

Each line on standard input is a :class:`memprof.plan.simulations.SimulationRequest` as JSON, each line on standard
output a :class:`~memprof.plan.simulations.SimulationResult`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import IO

import msgspec

from memprof.errors import MemprofError
from memprof.plan.simulations import SimulationRequest, SimulationResult
from memprof.simulate.evaluate import run_row
from memprof.simulate.fast_start import take_process


def serve(questions: IO[str], answers: IO[str]) -> None:
    """Answer every line of ``questions`` in order; an error of any library becomes a sentence."""
    for line in questions:
        answers.write(msgspec.json.encode(_answer(line)).decode() + "\n")
        answers.flush()


def _answer(line: str) -> SimulationResult:
    try:
        return SimulationResult(row=run_row(msgspec.json.decode(line, type=SimulationRequest)))
    except MemprofError as error:
        return SimulationResult(error=str(error), exit_code=error.exit_code)
    except Exception as error:
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"
        return SimulationResult(error=f"this run cannot be simulated ({what}).")


def _main() -> None:
    take_process()
    # What the lean trainer says of itself is of its run: a search would say it once for each worker.
    logging.getLogger("memprof.grpo").setLevel(logging.ERROR)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the asking process, which ends this one
    # What libraries print must not come between answers.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        try:
            serve(sys.stdin, answers)
        except BrokenPipeError:  # who asked has ended; what is still to be written must go somewhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), answers.fileno())


if __name__ == "__main__":
    _main()
