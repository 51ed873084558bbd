"""Draw what would lower the peak: the set that fits, and the changes one by one."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from textwrap import dedent

from memprof.reports.document.advice import advice_basis, advice_words, whole_step
from memprof.reports.html.elements import Markup, copyable, el, section

from memprof.report import Report
from memprof.report.advice import Advice, Combination
from memprof.units import amount
from memprof.vocabulary import Category

# The others are folded: the timeline is what people scroll to.
_SHOWN = 4


def advice_section(report: Report) -> Markup | None:
    """List the changes, those that save most first; with ``--gpu``, begin with the set that fits."""
    if not report.advice and report.combination is None:
        return None
    return section(
        "advice",
        "What would lower the peak",
        advice_basis(report),
        _combination(report.combination),
        *_lists([_change(change, report) for change in report.advice]),
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
        *[_how(setting) for setting in _joined([change.setting for change in found.changes])],
    )


def _same(report: Report) -> str:
    """Name what an exact change leaves as it is: a run without gradients has results alone."""
    return "same gradients" if report.own_peaks.get(Category.GRADIENTS) else "same results"


# A shell's options with at most one value each, ``name=value`` pairs and variables, and commands; no comma or bracket.
_SHELL = re.compile(
    r"(?:export )?(?:[A-Z_][A-Z0-9_]*=\S+(?: |$)\S*|(?:--?[\w.-]+(?:[= ][^\s,;()-][^\s,;()]*)?(?: |$))+"
    r"|(?:[\w.+]+=[^\s,;()]+(?: |$))+|(?:pip|accelerate|deepspeed|memprof|python|torchrun|trl) \S+(?: [^\s,;()]+)*)$"
)


def is_code(setting: str) -> bool:
    """Tell whether every line of a setting is code to paste: options, statements of Python, YAML, or a comment."""
    lines = [line.strip() for line in setting.splitlines() if line.strip()]
    return bool(lines) and (all(_is_line_of_code(line) for line in lines) or _is_python(setting))


def _is_line_of_code(line: str) -> bool:
    return line.startswith("#") or bool(_SHELL.match(line)) or _is_python(line)


def _is_python(text: str) -> bool:
    """Tell whether text is statements that do something: a name alone or a tuple of names is a sentence's."""
    try:
        body = ast.parse(dedent(text)).body
    except (SyntaxError, ValueError):
        return False
    return all(not isinstance(statement, ast.Expr) or isinstance(statement.value, ast.Call) for statement in body)


def _joined(settings: Sequence[str]) -> list[str]:
    """Join what is code, to be pasted at once; sentences stay apart."""
    code = [setting for setting in settings if is_code(setting)]
    return [*(["\n".join(code)] if code else []), *(setting for setting in settings if not is_code(setting))]


def _how(setting: str) -> Markup:
    """Show code to paste with a button that copies it, and a description as text."""
    return copyable(code=setting) if is_code(setting) else el("div", "How: ", setting)


def _change(change: Advice, report: Report) -> Markup:
    most = max(other.saves_bytes for other in report.advice) or 1
    width = f"width:{100 * change.saves_bytes / most:.2f}%"
    badges = [
        el(f"span.badge {change.basis}", "estimate" if change.basis == "estimated" else change.basis),
        el("span.badge exact", _same(report)) if change.exact else None,
    ]
    of = whole_step(change, report)
    whole = f" of {amount(of)}" if of else ""
    after = f"leaves {amount(change.peak_after_bytes)}{whole}" if change.peak_after_bytes is not None else ""
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
            _how(change.setting) if change.setting else None,
            el("div.muted", el("b", "Cost: "), advice_words(change)),
        ),
    )
