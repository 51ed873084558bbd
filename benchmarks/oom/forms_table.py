"""The table of forms in ``docs/oom.md``, from the tests' examples: what is shown there is what the tests hold."""

from __future__ import annotations

import textwrap
from collections import Counter

from benchmarks.tabling import table
from memprof.oom import explain_log
from memprof.oom.known_messages import FORMS, NOT_MEMORY
from tests.oom.examples import EXAMPLES, NOT_MEMORY_EXAMPLES

__all__ = ["TABLES"]

_WIDTH = 44


def _cell(text: str, width: int = _WIDTH) -> str:
    words = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    return f"`{words}`" if len(words) <= width else f"`{words[: width - 2].rstrip()} …`"


def forms() -> str:
    """Name the programs whose messages are read, by the kind of the first, with how many there are."""
    kinds: dict[str, list[str]] = {}
    counts = Counter(form.program for form in FORMS)
    firsts = {form.program: form for form in reversed(FORMS)}
    for program, count in counts.items():
        (failure,) = explain_log(EXAMPLES[firsts[program].id].text)["failures"]
        kinds.setdefault(failure["kind"], []).append(program if count == 1 else f"{program} ({count})")
    lines = (f"- `{kind}`: {', '.join(programs)}." for kind, programs in sorted(kinds.items()))
    return "".join(textwrap.fill(line, 120, subsequent_indent="  ") + "\n" for line in lines)


def not_memory() -> str:
    """What sounds like memory and is not."""
    about = {form.id: form.says for form in NOT_MEMORY}
    rows = [(_cell(text), about[name].split(":")[0]) for name, text in NOT_MEMORY_EXAMPLES.items()]
    return table(("a text", "what it is"), rows).replace("--:", "---")


TABLES = {"oom-forms": forms, "oom-not-memory": not_memory}
