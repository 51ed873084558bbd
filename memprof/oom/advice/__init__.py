"""The cause of a failure and what to try, from the table that knows its form."""

from __future__ import annotations

from memprof.oom.advice.backends import for_backend
from memprof.oom.advice.device import Remedy, device_remedies
from memprof.oom.advice.engines import ENGINES
from memprof.oom.advice.host import HOST
from memprof.oom.advice.libraries import LIBRARIES
from memprof.oom.arithmetic import Parts, Verdict, verdict
from memprof.oom.failure import Failure
from memprof.oom.frameworks import Names

__all__ = ["answer"]

_TABLES = (ENGINES, HOST, LIBRARIES)


def answer(
    failure: Failure, parts: Parts, phase: str | None, logits: bool, names: Names
) -> tuple[Verdict, list[Remedy]]:
    """Return why it failed and what to try, first things first.

    A form has its own answer (by its id, else by its event); torch's device messages are decided by their numbers.
    """
    if failure.kind == "device":
        decided = verdict(failure, parts)
        return decided, for_backend(failure.backend, device_remedies(decided, failure, phase, logits, names))
    for key in (failure.form.id, failure.form.event):
        for table in _TABLES:
            if key in table:
                because, rows = table[key](failure, names)
                return Verdict(failure.kind, failure.form.id, because), for_backend(
                    failure.backend, [row for row in rows if row[0]]
                )
    raise LookupError(f"no advice for {failure.form.id}")  # a test walks every form
