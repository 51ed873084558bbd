"""What Markdown renderers share: words that are no markup, code spans, fences, tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from memprof.reports.document.model import Headline

__all__ = ["code", "fence", "headline", "table", "text"]

_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&$@]|:(?=\S))")


def text(words: str) -> str:
    """Escape words from anywhere: nothing in them is markup, a link, a mention or the end of a table's cell."""
    return _SPECIAL.sub(r"\\\1", words.replace("\n", " ")).replace("\\<", "&lt;").replace("\\>", "&gt;")


def headline(found: Headline) -> str:
    """Render the answer as one paragraph, its verdict in bold."""
    parts = (text(part) for part in (found.cause, found.action, found.assumed) if part)
    return " ".join([f"**{text(found.verdict)}.**", *parts])


def code(words: str) -> str:
    """Put a code span around anything, safe inside a table."""
    longest = max((len(run) for run in re.findall(r"`+", words)), default=0)
    ticks = "`" * (longest + 1)
    pad = " " if words.startswith("`") or words.endswith("`") else ""
    return f"{ticks}{pad}{words}{pad}{ticks}".replace("|", "\\|")


def fence(lines: Iterable[str], indent: str = "") -> str:
    body = [f"{indent}{line}" for line in lines]
    longest = max((len(run) for line in body for run in re.findall(r"`+", line)), default=0)
    ticks = "`" * max(longest + 1, 3)
    return "\n".join([f"{indent}{ticks}text", *body, f"{indent}{ticks}"])


def table(head: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> str:
    """Make a table of cells that are Markdown already; ``align`` has one letter a column, ``l`` or ``r``."""
    rule = ["---:" if a == "r" else "---" for a in align]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *rows])
