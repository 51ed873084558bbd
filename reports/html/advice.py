"""Draw what would lower the peak: the set that fits, and the changes one by one."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.reports.document.model import Advice, Advised, Combination
from memprof.reports.html.elements import Markup, copyable, el, section

from memprof.units import amount

# The others are folded: the timeline is what people scroll to.
_SHOWN = 4


def advice_section(advised: Advised) -> Markup | None:
    """List the changes, those that save most first; where a card was asked about, begin with the set that fits it."""
    if not advised.changes and advised.combination is None:
        return None
    return section(
        "advice",
        "What would lower the peak",
        advised.basis,
        _combination(advised.combination),
        *_lists([_change(a, advised.changes) for a in advised.changes]),
    )


def _lists(items: Sequence[Markup]) -> list[Markup]:
    """Show the first changes, fold the rest."""
    shown, rest = items[:_SHOWN], items[_SHOWN:]
    found = [el("ol.advice", *shown)] if shown else []
    if rest:
        more = el("summary", "One more that saves less" if len(rest) == 1 else f"{len(rest)} more that save less")
        found.append(el("details", more, el("ol.advice", {"start": str(_SHOWN + 1)}, *rest)))
    return found


def _combination(found: Combination | None) -> Markup | None:
    if found is None:
        return None
    return el(
        "div",
        {"class": "together" if found.fits else "together not"},
        el("p", el("strong", found.sentence)),
        copyable(code="\n".join(found.settings)) if found.settings else None,
    )


def _change(change: Advice, all_changes: Sequence[Advice]) -> Markup:
    most = max(a.saves_bytes for a in all_changes) or 1
    width = f"width:{100 * change.saves_bytes / most:.2f}%"
    words = " ".join(w for w in (change.costs, change.limit, change.also) if w)
    badges = [
        el(f"span.badge {change.basis}", "estimate" if change.basis == "estimated" else change.basis),
        el("span.badge exact", "same gradients") if change.exact else None,
    ]
    whole = f" of {amount(change.of_bytes)}" if change.of_bytes else ""
    after = f"leaves {amount(change.after_bytes)}{whole}" if change.after_bytes is not None else ""
    return el(
        "li",
        el(
            "div.saves",
            el("strong", amount(-change.saves_bytes)),
            el("div.bar thin", {"aria-hidden": "true"}, el("span.seg c-saved", {"style": width})),
            el("span.muted", after),
        ),
        el(
            "div.change",
            el("div", el("strong", change.action), " ", *badges),
            copyable(code=change.setting) if change.setting else None,
            el("div.muted", words),
        ),
    )
