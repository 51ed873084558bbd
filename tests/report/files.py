"""Read answers as dictionaries, as the tests compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memprof.errors import InputError
from memprof.report.base import Model
from memprof.report.codec import answers, from_builtins, to_builtins
from memprof.report.files import read_answer
from memprof.report.ranks import RankSummary


def read_memprof_json(path: Path) -> dict[str, Any] | None:
    """Read memprof's JSON as :func:`memprof.report.files.read_answer` does."""
    answer = read_answer(path)
    if isinstance(answer, Model):
        return to_builtins(answer)
    return None if answer is None else {"schema": answer}


def validate(data: dict[str, Any]) -> None:
    """Raise InputError if ``data`` is not what its schema says."""
    kind = answers().get(str(data.get("schema")))
    if kind is None:
        raise InputError(f"not a report that memprof understands: schema {str(data.get('schema'))[:40]!r} (at schema).")
    from_builtins(data, kind)


def problem(definition: str, data: Any) -> str | None:
    """Return what is wrong with the summary of a rank, or ``None``."""
    assert definition == "rank"
    try:
        from_builtins(data, RankSummary)
    except InputError as error:
        return str(error)
    return None
