"""Render what would lower a peak as a Markdown table."""

from __future__ import annotations

from memprof.reports.document.advice import NOTHING_KNOWN
from memprof.reports.document.model import Advised, Document
from memprof.reports.document.text import gib
from memprof.reports.markdown.elements import code, fence, table, text

__all__ = ["render_advice", "render_advised"]


def render_advice(document: Document) -> str:
    """Render the advice of a document and nothing else of it; one sentence where there is none."""
    return render_advised(document.advice) or f"{NOTHING_KNOWN}\n"


def render_advised(advised: Advised) -> str:
    """Render what would lower the peak as a table, below the set that fits where a card was asked about."""
    blocks = []
    if (together := advised.combination) is not None:
        blocks.append(f"**{text(together.sentence)}**")
        if together.settings:
            blocks.append(fence(together.settings))
    if advised.changes:
        rows = [
            [
                text(gib(a.saves_bytes)),
                text(a.basis),
                text(a.action),
                code(a.setting) if a.setting else "",
                "yes" if a.exact else "no",
                text(" ".join(w for w in (a.costs, a.limit, a.also) if w)),
            ]
            for a in advised.changes
        ]
        head = ["Saves, GiB", "Basis", "What would lower the peak", "Setting", "Same gradients", "Costs"]
        blocks.append(table(head, "rlllll", rows))
        blocks.append(text(_capital(advised.basis)) + ".")
    return "\n\n".join(blocks) + "\n" if blocks else ""


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
