"""Tell whose run it was, and that framework's names for the settings of an answer (``framework_settings.toml``)."""

from __future__ import annotations

import re
from functools import cache

import msgspec

from memprof.oom.knowledge_files import typed

_OF_ROLLOUTS = ("rollout", "log_probs", "share", "sleep", "model_len")


class Names(msgspec.Struct, frozen=True, dict=True, rename={"framework": "name"}):
    """One framework: its settings in its own words, ready to paste; empty where it has none.

    Attributes:
        framework: as a reader knows it.
        kind: ``training``, ``serving`` or ``images``.
        words: the settings by the names that ``framework_settings.toml`` explains.
        supervised: those that are worded otherwise unless the text shows a trainer that generates completions.
        signs: regular expressions of which one is found in a text of this framework.
        programs: whose messages are its own.
        tasks: phases by the name of a Ray task.
        on: settings of ``facts.toml`` that are on by default.
        sleeps: its engine maps and unmaps its memory while the policy trains.
    """

    framework: str
    kind: str = "training"
    words: dict[str, str] = {}
    supervised: dict[str, str] = {}
    signs: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    example: str = ""
    tasks: dict[str, str] = {}
    sleeps: bool = False
    on: tuple[str, ...] = ()


#: Words of no framework.
PLAIN = Names("", words=typed("framework_settings", "plain", dict[str, str]))
#: Every framework, in the order in which they are tried.
frameworks = cache(lambda: typed("framework_settings", "framework", tuple[Names, ...]))


def names_in(text: str) -> Names | None:
    """Return the framework that a text shows, such as stacks' file names; None where it shows none."""
    found = next((names for names in frameworks() if any(re.search(sign, text) for sign in names.signs)), None)
    if found is None or not found.supervised or re.search(typed("framework_settings", "rollouts", str), text):
        return found
    words = {key: text for key, text in found.words.items() if key not in _OF_ROLLOUTS}
    return msgspec.structs.replace(found, words={**words, **found.supervised})


def plain_in(text: str) -> Names:
    """Return the words of no framework; with transformers' own where a text shows its files."""
    own = typed("framework_settings", "transformers", dict[str, str])
    return Names("", words={**PLAIN.words, **own}) if re.search(own.pop("sign"), text) else PLAIN


def names_for_program(program: str) -> Names | None:
    """Return the framework whose message it is, by the program's name."""
    return next((names for names in frameworks() if program in names.programs), None)
