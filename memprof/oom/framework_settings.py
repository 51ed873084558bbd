"""Tell whose run it was, and that framework's names for the settings of an answer (``framework_settings.toml``)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from memprof.oom.knowledge_files import table


@dataclass(frozen=True)
class Names:
    """One framework: its settings in its own words, ready to paste; empty where it has none.

    Attributes:
        framework: as a reader knows it.
        kind: ``training``, ``serving`` or ``images``.
        tasks: phases by the name of a Ray task.
        words: the settings by the names that ``framework_settings.toml`` explains.
        on: settings of ``facts.toml`` that are on by default.
        sleeps: its engine maps and unmaps its memory while the policy trains.
    """

    framework: str
    kind: str = "training"
    words: dict[str, str] = field(default_factory=dict)
    signs: tuple[re.Pattern[str], ...] = field(default=(), repr=False)
    programs: tuple[str, ...] = ()
    example: str = ""
    tasks: dict[str, str] = field(default_factory=dict)
    sleeps: bool = False
    on: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.words.get(name, "")


def _names(entry: dict[str, Any]) -> Names:
    own = {**entry, "signs": tuple(map(re.compile, entry["signs"])), "programs": tuple(entry.get("programs", ())), "on": tuple(entry.get("on", ()))}
    return Names(own.pop("name"), **own)


#: Words of no framework.
PLAIN = Names("", words=table("framework_settings")["plain"])


@cache
def frameworks() -> tuple[Names, ...]:
    """Return every framework, in the order in which they are tried."""
    return tuple(_names(entry) for entry in table("framework_settings")["framework"])


def names_in(text: str) -> Names | None:
    """Return the framework that a text shows, such as stacks' file names; None where it shows none."""
    return next((names for names in frameworks() if any(sign.search(text) for sign in names.signs)), None)


def plain_in(text: str) -> Names:
    """Return the words of no framework; with transformers' own where a text shows its files."""
    own = dict(table("framework_settings")["transformers"])
    return Names("", words={**PLAIN.words, **own}) if re.search(own.pop("sign"), text) else PLAIN


def names_for_program(program: str) -> Names | None:
    """Return the framework whose message it is, by the program's name."""
    return next((names for names in frameworks() if program in names.programs), None)
