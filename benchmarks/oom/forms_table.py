"""The table of forms in ``docs/oom.md``, from the tests' examples: what is shown there is what the tests hold."""

from __future__ import annotations

from collections import Counter

from benchmarks.tabling import table
from memprof.oom import explain_log
from memprof.oom.messages import FORMS, NOT_MEMORY
from tests.oom.examples import EXAMPLES, NOT_MEMORY_EXAMPLES

__all__ = ["TABLES"]

_WIDTH = 60


def _cell(text: str, width: int = _WIDTH) -> str:
    words = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    return f"`{words}`" if len(words) <= width else f"`{words[: width - 2].rstrip()} …`"


def forms() -> str:
    """Each program with the number of its messages, their kinds and the first of them."""
    firsts = {form.program: form for form in reversed(FORMS)}
    counts = Counter(form.program for form in FORMS)
    rows = []
    for program, count in counts.items():
        (failure,) = explain_log(EXAMPLES[firsts[program].id].text)["failures"]
        rows.append((program if count == 1 else f"{program}, {count}", failure["kind"], _cell(failure["message"])))
    return table(("whose, how many", "kind", "one of them"), rows).replace("--:", "---")


def not_memory() -> str:
    """What sounds like memory and is not."""
    about = {form.id: form.says for form in NOT_MEMORY}
    rows = [(_cell(text), about[name].split(":")[0]) for name, text in NOT_MEMORY_EXAMPLES.items()]
    return table(("a text", "what it is"), rows).replace("--:", "---")


TABLES = {"oom-forms": forms, "oom-not-memory": not_memory}
