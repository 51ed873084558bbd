"""The table of forms in ``docs/oom.md``, from the tests' examples: what is shown there is what the tests hold."""

from __future__ import annotations

import textwrap
from collections import Counter

from memprof.oom.explain import explain_log
from memprof.oom.known_messages import FORMS
from tests.oom.examples import EXAMPLES


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


TABLES = {"oom-forms": forms}
