"""Render ``memprof explain`` as a Markdown list."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.reports.document.model import Allocation
from memprof.reports.document.tables import fold_shared
from memprof.reports.document.text import gib, size, thousands
from memprof.reports.markdown.elements import code, fence, text

__all__ = ["render_allocations"]


def render_allocations(allocations: Sequence[Allocation]) -> str:
    """Render every allocation with its evidence and its stack; frames that all stacks share stand once, above."""
    shared, allocations = fold_shared(allocations)
    blocks = [f"All share:\n\n{fence(shared)}\n"] if shared else []
    for a in allocations:
        label = a.category_label + (f" / {a.detail}" if a.detail else "")
        many = f" in {text(thousands(a.count))} blocks of {text(size(a.each_bytes))}" if a.count > 1 else ""
        head = f"**{text(gib(a.bytes))} GiB**{many} {text(label)} at {code(a.address)}"
        head += f", {text(a.phase_label)}, alive {text(a.lifetime)}"
        what = " ".join(w for w in (a.name, a.shape) if w)
        lines = [f"- {head}", f"  {code(what)}" if what else "", f"  {text(a.evidence)}: {text(a.why)}"]
        if a.stack:
            lines.append(fence(a.stack, "  "))
        blocks.append("\n".join(line for line in lines if line))
    return "\n".join(blocks) + "\n"
