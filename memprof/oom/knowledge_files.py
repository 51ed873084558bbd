"""Read the knowledge files (``memprof/oom/knowledge/*.toml``) into typed rules; a key that no rule has is an error."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from memprof.files import read_toml

_FOLDER = Path(__file__).parent / "knowledge"

#: Files of messages. Of two that match the same words, the one in the earlier file (or higher up in it) is taken.
MESSAGE_FILES = ("engines", "libraries", "accelerators", "host")
#: The files that have remedies; of two with one id, the one in the earlier file is taken.
REMEDY_FILES = ("remedies", *MESSAGE_FILES)

#: One template, or several of which the first fits whose names are all known.
Texts = str | tuple[str, ...]
#: Names of facts (``facts.toml``).
Names = tuple[str, ...]
#: What to try: a remedy's id, or what to do and why.
Tries = tuple[str | tuple[Texts, Texts], ...]
_T = TypeVar("_T")


class KnowledgeRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What rules have in common: all facts of ``when``, one of ``any`` and none of ``unless`` must hold."""

    when: Names = ()
    any: Names = ()
    unless: Names = ()


class FactRule(KnowledgeRule, frozen=True, kw_only=True):
    """How a fact is told from frames, the message and the lines around it; ``facts.toml`` explains the keys."""

    says: str = ""
    all: Names = ()
    frames: str = ""
    near: str = ""
    inner: str = ""
    last: str = ""
    code: str = ""
    message: str = ""
    around: str = ""
    log: str = ""
    text: str = ""


class ProcessTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a row of a table of processes looks, and the unit (bytes) of a size without one."""

    row: str
    unit: int


class FactsFile(msgspec.Struct, frozen=True):
    """``facts.toml``: facts, tables of processes, and regular expressions by name."""

    fact: dict[str, FactRule]
    setting: dict[str, str]
    pattern: dict[str, str]
    capture: dict[str, str]
    number: dict[str, str]
    size: dict[str, str]
    table: dict[str, ProcessTable]


class Remedy(KnowledgeRule, frozen=True, kw_only=True):
    """What would help; ``remedies.toml`` explains the keys."""

    do: Texts
    why: Texts = ""
    do_when: tuple[Names, ...] = ()
    why_when: tuple[Names, ...] = ()
    already: str = ""
    frees: str = ""
    help: float = 0.8
    help_when: Names = ()
    help_then: float = 0.0
    price: int = 1
    covers: Names = ()


class Cause(KnowledgeRule, frozen=True, kw_only=True, rename={"tries": "try"}):
    """Why it failed, by numbers (``causes.toml``) or by the message alone (an ``answer`` beside it)."""

    because: Texts = ""
    because_when: tuple[Names, ...] = ()
    reason: str = ""
    cause: str = ""
    tries: Tries = ()
    certainty: float = 0.9
    work: float = 0.0
    same_as: str = ""


class Circumstance(KnowledgeRule, frozen=True, kw_only=True, rename={"tries": "try"}):
    """What frames and lines around a message add; ``causes.toml`` explains the keys."""

    id: str
    says: Texts
    certainty: float
    group: str = ""
    only_causes: Names | None = None
    instead_of: Names = ()
    instead_when: Names = ()
    cause: str = ""
    leads: bool = False
    tries: Tries = ()


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A remedy as advice for a recording words it (``remedies.toml``)."""

    remedy: str
    action: str
    setting: str
    costs: str
    exact: bool
    cost_rank: str


class NumberMeaning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a figure of an answer means (``torch.toml``)."""

    field: str
    name: str
    meaning: str
    by_kind: dict[str, str] = {}


@cache
def table(name: str) -> Mapping[str, object]:
    """Return one file as it stands."""
    return read_toml(_FOLDER / f"{name}.toml")


def typed(name: str, key: str, kind: type[_T]) -> _T:
    """Return one table of a file as ``kind``, empty if the file has none.

    Raises:
        msgspec.ValidationError: it has a key or a value that ``kind`` does not.
    """
    found = table(name).get(key)
    return kind() if found is None else msgspec.convert(found, kind)


#: ``facts.toml``.
facts_file = cache(lambda: msgspec.convert(table("facts"), FactsFile))
#: The causes by numbers, in the order in which they are tried.
causes = cache(lambda: typed("causes", "cause", tuple[Cause, ...]))
#: What surroundings can add, in order.
circumstances = cache(lambda: typed("causes", "circumstance", tuple[Circumstance, ...]))


@cache
def answers() -> dict[str, Cause]:
    """Return what is said of each message, by its id, its event or the answer that it shares."""
    return {key: row for name in MESSAGE_FILES for key, row in typed(name, "answer", dict[str, Cause]).items()}


@cache
def remedies_of(name: str) -> dict[str, Remedy]:
    """Return the remedies of one file by their ids."""
    return typed(name, "remedy", dict[str, Remedy])
