"""The table of forms in ``docs/oom.md``, from the tests' examples: what is shown there is what the tests hold."""

from __future__ import annotations

import textwrap

from memprof.oom.explain import explain_log
from memprof.oom.known_messages import FORMS
from tests.oom.wordings import EXAMPLES


def forms() -> str:
    """Name the programs whose messages are read, by the kind of the first."""
    kinds: dict[str, list[str]] = {}
    firsts = {form.program: form for form in reversed(FORMS)}
    for program in dict.fromkeys(form.program for form in FORMS):
        (failure,) = explain_log(EXAMPLES[firsts[program].id].text).failures
        kinds.setdefault(failure.kind, []).append(program)
    lines = (f"- `{kind}`: {', '.join(programs)}." for kind, programs in sorted(kinds.items()))
    return "".join(textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False) + "\n" for line in lines)


TABLES = {"oom-forms": forms}
