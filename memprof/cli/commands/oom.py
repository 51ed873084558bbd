"""``memprof oom``: explain an out-of-memory message or log."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from memprof.cli.emit import Output, emit, output_options
from memprof.cli.options import RECORDING, redact_option
from memprof.errors import InputError
from memprof.files import refuse_special
from memprof.reports.renderers import Answer

# The message is at the end of a log; of a larger one only that is read.
_MOST_BYTES = 256 * 2**20


@click.command(name="oom")
@click.argument("log", type=RECORDING, metavar="LOG|-")
@output_options("oom")
@redact_option
def command(log: Path, output: Output, redact: bool) -> None:
    """Explain the out-of-memory failures in LOG (- reads standard input): what each number means, what is missing, the
    cause, and what to try, in order.

    LOG is any text that holds one: a pasted message, a whole log, several ranks' output, a notebook's page. memprof
    reads torch's messages, those of engines and libraries (vLLM, SGLang, NCCL, bitsandbytes, ...), and what Ray,
    Slurm, Kubernetes, launchers and the kernel say when they kill a process. It needs no torch and no GPU.
    """
    from memprof.oom.explain import explain_log

    answer = explain_log(_read(log))
    if not answer["failures"]:
        name = "standard input" if str(log) == "-" else str(log)
        what = " ".join(answer["notes"]) or (
            "If a process was killed or an engine refused to start, paste the lines around that, not the last ones "
            "only."
        )
        raise InputError(f"{name} holds no out-of-memory message. {what}")
    if redact:
        from memprof.redact import redact as without_names

        answer = without_names(answer)
    emit(Answer("oom", answer, lambda: answer), output)


def _read(log: Path) -> str:
    try:
        if str(log) == "-":
            data = b""
            while more := sys.stdin.buffer.read(_MOST_BYTES):
                data = (data + more)[-_MOST_BYTES:]
        else:
            refuse_special(log)
            with log.open("rb") as file:
                if (size := log.stat().st_size) > _MOST_BYTES:
                    file.seek(size - _MOST_BYTES)
                data = file.read(_MOST_BYTES)
    except OSError as error:
        raise InputError(f"{log}: cannot be read ({error.strerror or error}).") from None
    # PowerShell's > writes UTF-16.
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    return data.decode(encoding, "replace")
