"""``memprof oom``: explain an out-of-memory message or log."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from typing import BinaryIO

import click

from memprof.cli.answers import redacted
from memprof.cli.emit import Output, emit, output_options
from memprof.cli.options import RECORDING, redact_option
from memprof.errors import InputError
from memprof.files import refuse_special
from memprof.reports.renderers import Answer
from memprof.snapshot.packed import PIECE, is_packed, unpacked

# The message is at the end of a log; of a larger one only that is read.
_MOST_BYTES = 256 * 2**20
# A log may pack better than a snapshot; only its end is kept, whatever it unpacks to.
_LOGS_PACK_WELL = 32 * 2**20
_LOOKED_AT = 4096


@click.command(name="oom")
@click.argument("log", type=RECORDING, metavar="LOG|-")
@click.option("--explain-facts", is_flag=True, help="List what was read from the text, with the line of each fact.")
@output_options("oom")
@redact_option
def command(log: Path, explain_facts: bool, output: Output, redact: bool) -> None:
    """Explain the out-of-memory failures in LOG (- reads standard input): what each number means, what is missing, the
    cause, and what to try, in order.

    LOG is any text that holds one: a pasted message, a whole log, several ranks' output, a notebook's page. memprof
    reads torch's messages, those of engines and libraries (vLLM, SGLang, NCCL, bitsandbytes, ...), and what Ray,
    Slurm, Kubernetes, launchers and the kernel say when they kill a process. It needs no torch and no GPU.
    """
    from memprof.oom.explain import explain_log

    answer = explain_log(_read(log), explain_facts=explain_facts)
    if not answer.failures:
        name = "standard input" if str(log) == "-" else str(log)
        what = " ".join(answer.notes) or (
            "If a process was killed or an engine refused to start, paste the lines around that, not the last ones "
            "only."
        )
        raise InputError(f"{name} contains no out-of-memory message. {what}")
    shared = redacted(answer, redact)
    emit(Answer("oom", shared, lambda: shared), output)


def _read(log: Path) -> str:
    """Return the text of a log or of standard input, unpacked: of a long one its end."""
    name = "standard input" if str(log) == "-" else str(log)
    try:
        if str(log) == "-":
            return _decoded(_end_of(sys.stdin.buffer, 0, name))
        refuse_special(log)
        size = log.stat().st_size
        with log.open("rb") as file:
            if size > _MOST_BYTES and not is_packed(file.read(8)):
                file.seek(size - _MOST_BYTES)
            else:
                file.seek(0)
            return _decoded(_end_of(file, size, name))
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror or error}).") from None


def _end_of(file: BinaryIO, size: int, name: str) -> bytes:
    """Return the last bytes of a file, of what it unpacks to if it is gzip, xz or zstd."""
    kept: deque[bytes] = deque()
    total = 0
    for piece in unpacked(iter(lambda: file.read(PIECE), b""), max(size, _LOGS_PACK_WELL), name):
        kept.append(piece)
        total += len(piece)
        while total - len(kept[0]) >= _MOST_BYTES:
            total -= len(kept.popleft())
    return b"".join(kept)


def _decoded(data: bytes) -> str:
    """Decode UTF-8, or UTF-16 with or without its mark: Windows' PowerShell writes it."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", "replace")
    head = data[:_LOOKED_AT]
    if head.count(0) > len(head) // 4:  # every second byte of a text in Latin letters
        little = head[1::2].count(0) >= head[::2].count(0)
        return data.decode("utf-16-le" if little else "utf-16-be", "replace")
    return data.decode("utf-8-sig", "replace")
