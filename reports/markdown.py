"""The same document as GitHub markdown, for issues and pull requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from memprof.reports.document.comparison import Comparison, Line, OnlyIn, children_worth_a_line
from memprof.reports.document.model import Advised, Allocation, Document, Ranks, Row
from memprof.reports.document.text import duration, gib, percent, thousands

__all__ = [
    "code",
    "render_advice",
    "render_allocations",
    "render_comparison",
    "render_markdown",
    "table",
    "text",
]

_MOST_RANKS = 32
_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&$@]|:(?=\S))")


def render_markdown(document: Document) -> str:
    """Title, peak, the rows, the phases and the largest allocations as tables; notes at the end."""
    blocks = [
        f"### {text(document.title)}",
        text(" · ".join(document.subtitle)),
        _oom(document),
        _peak(document),
        _facts(document),
        _prediction(document),
        _rows(document.rows),
        ranks_text(document.ranks),
        _phases(document),
        _largest(document),
        render_advice(document.advice).rstrip(),
        _closing(document),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def render_advice(advised: Advised) -> str:
    """What would lower the peak, as a table; the set that fits before it."""
    blocks = []
    if (together := advised.combination) is not None:
        blocks.append(f"**{text(together.sentence)}**")
        if together.settings:
            blocks.append(_fence(together.settings))
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


def render_allocations(allocations: Sequence[Allocation]) -> str:
    """Every allocation with its evidence and stack, stacks folded."""
    blocks = []
    for a in allocations:
        label = a.category_label + (f" / {a.detail}" if a.detail else "")
        head = f"**{text(gib(a.bytes))} GiB** {text(label)} at {code(a.address)}"
        head += f", {text(a.phase_label)}, alive {text(a.lifetime)}"
        what = " ".join(w for w in (a.name, a.shape) if w)
        lines = [f"- {head}", f"  {code(what)}" if what else "", f"  {text(a.evidence)}: {text(a.why)}"]
        if a.stack:
            lines.append(_fence(a.stack, "  "))
        blocks.append("\n".join(line for line in lines if line))
    return "\n".join(blocks) + "\n"


def text(words: str) -> str:
    """Words from anywhere: nothing in them is markup, a link, a mention or the end of a table's cell."""
    return _SPECIAL.sub(r"\\\1", words.replace("\n", " ")).replace("\\<", "&lt;").replace("\\>", "&gt;")


def code(words: str) -> str:
    """A code span around anything, safe inside a table."""
    longest = max((len(run) for run in re.findall(r"`+", words)), default=0)
    ticks = "`" * (longest + 1)
    pad = " " if words.startswith("`") or words.endswith("`") else ""
    return f"{ticks}{pad}{words}{pad}{ticks}".replace("|", "\\|")


def _fence(lines: Iterable[str], indent: str = "") -> str:
    body = [f"{indent}{line}" for line in lines]
    longest = max((len(run) for line in body for run in re.findall(r"`+", line)), default=0)
    ticks = "`" * max(longest + 1, 3)
    return "\n".join([f"{indent}{ticks}text", *body, f"{indent}{ticks}"])


def table(head: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are markdown already; ``align`` has one letter a column, ``l`` or ``r``."""
    rule = ["---:" if a == "r" else "---" for a in align]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *rows])


def _oom(document: Document) -> str:
    return f"> **{text(document.oom.sentence)}**" if document.oom else ""


def _peak(document: Document) -> str:
    summary = document.summary
    share = f", {percent(summary.peak_bytes, summary.capacity_bytes)} of the device" if summary.capacity_bytes else ""
    head = f"**{text(summary.peak_word)}: {gib(summary.peak_bytes)} GiB** in {text(summary.where)}{share}."
    return f"{head} {text(summary.cause)}"


def _facts(document: Document) -> str:
    return "\n".join(f"- {text(f.label)}: **{text(f.value)}** ({text(f.note)})" for f in document.summary.facts)


def _prediction(document: Document) -> str:
    """The verdict, and its tables, of a simulated run."""
    found = document.prediction
    if found is None:
        return ""
    words = {True: "fits", False: "**does not fit**", None: "–"}
    needs = [
        [
            f"{text(n.label)}{' **decides**' if n.decides else ''}",
            gib(n.allocated_bytes),
            gib(n.needed_bytes),
            words[n.fits],
        ]
        for n in found.needs
    ]
    lengths = [
        [text(n.label), thousands(n.tokens), percent(round(1e6 * n.share_below), 1_000_000), gib(n.peak_bytes),
         gib(n.needed_bytes), words[n.fits], "executed" if n.executed else "between two executed"]
        for n in found.lengths
    ]  # fmt: skip
    blocks = [
        text(found.verdict),
        table(["Phase", "Held, GiB", "Needed, GiB", "Alone"], "lrrl", needs) if needs else "",
        text(found.lengths_sentence),
        table(["Longest completion", "Tokens", "Steps at most so long", "Held, GiB", "Needed, GiB", "Verdict", "Known"],
              "lrrrrll", lengths) if lengths else "",
        text(found.error),
    ]  # fmt: skip
    return "\n\n".join(block for block in blocks if block)


def _rows(rows: Sequence[Row]) -> str:
    total = rows[-1].at_peak
    lines = []
    for row in rows:
        bold = "**" if row.id == "total" else ""
        lines.append([f"{bold}{text(row.label)}{bold}", f"{bold}{text(gib(row.at_peak))}{bold}", *_shares(row, total)])
        lines += [[f"&nbsp;&nbsp;{text(c.label)}", text(gib(c.at_peak)), *_shares(c, total)] for c in row.children]
    return table(["GiB", "At the peak", "of peak", "Own peak"], "lrrr", lines)


def _shares(row: Row, total: int) -> list[str]:
    return [text(percent(row.at_peak, total)), "–" if row.own_peak is None else text(gib(row.own_peak))]


def _phases(document: Document) -> str:
    if not document.phases:
        return ""
    rows = [
        [
            f"{text(p.label)}{f' ×{p.count}' if p.count > 1 else ''}{' **peak**' if p.is_peak else ''}",
            duration(p.total_us),
            gib(p.peak_bytes),
        ]
        for p in document.phases
    ]
    return table(["Phase", "Time", "Peak, GiB"], "lrr", rows)


def ranks_text(ranks: Ranks | None) -> str:
    """The ranks, the fullest first, by category; nothing where there is one process."""
    if ranks is None:
        return ""
    head = ["Rank", "Peak in", "GiB", *[text(label) for _, label in ranks.columns]]
    rows = [
        [f"{r.rank}{' **out of memory**' if r.oom else ''}", text(r.where), f"**{text(gib(r.peak_bytes))}**"]
        + [text(gib(c.bytes)) for c in r.cells]
        for r in ranks.rows[:_MOST_RANKS]
    ]
    words = [text(w) for w in (ranks.sentence, ranks.missing, *ranks.differences) if w]
    return "\n\n".join([" ".join(words), table(head, "llr" + "r" * len(ranks.columns), rows)])


def _largest(document: Document) -> str:
    rows = []
    for a in document.allocations[:10]:
        many = f" ×{thousands(a.count)}" if a.count > 1 else ""
        name = a.name or a.shape or a.detail or a.category_label
        rows.append(
            [code(name) + many, text(a.category_label), text(gib(a.bytes)), text(a.why), code(a.site) if a.site else ""]
        )
    return (
        table(["Largest alive at the peak", "Category", "GiB", "How it is known", "Made at"], "llrll", rows)
        if rows
        else ""
    )


def _closing(document: Document) -> str:
    known = ", ".join(f"{e.id} {100 * e.share:.1f} %" for e in document.evidence)
    wrong = [c for c in document.adds_up.checks if c.ok is False]
    sums = "; ".join(f"{c.label}: {c.value}, {c.note}" for c in wrong) if wrong else "yes, to the byte"
    lines = [f"How it is known: {text(known)}.", f"Does it add up? {text(sums)}."]
    lines += [f"- {text(note)}" for note in document.notes]
    return "\n".join(lines)


def render_comparison(comparison: Comparison) -> str:
    """Headlines, settings, the rows, who fits, and the largest allocations one run has and the other has not."""
    blocks = [
        f"### {text(comparison.title)}",
        "\n".join(text(sentence) for sentence in comparison.headlines),
        _settings(comparison),
        _compared_rows(comparison),
        *[_only_in(entry) for entry in comparison.only_in],
        "\n".join(f"- {text(note)}" for note in comparison.notes),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _settings(comparison: Comparison) -> str:
    if not comparison.settings:
        return ""
    labels = [text(column.label) for column in comparison.columns]
    rows = [[code(s.name), *[code(v) if v != "–" else v for v in s.values]] for s in comparison.settings]
    important = [row for row, s in zip(rows, comparison.settings, strict=True) if s.matters]
    others = [row for row, s in zip(rows, comparison.settings, strict=True) if not s.matters]
    blocks = [table(["What changed", *labels], "l" * (1 + len(labels)), important)] if important else []
    if others:
        rest = table(["Setting", *labels], "l" * (1 + len(labels)), others)
        blocks.append(f"<details><summary>{len(others)} other settings differ</summary>\n\n{rest}\n\n</details>")
    return "\n\n".join(blocks)


def _compared_rows(comparison: Comparison) -> str:
    head = ["GiB"]
    for column in comparison.columns:
        head += [f"{text(column.label)} ({text(column.badge)})", "own peak"]
    for column in comparison.columns[1:]:
        name = f" {text(column.label)}" if len(comparison.columns) > 2 else ""
        head += [f"Difference{name}", f"Ratio{name}", f"Change{name}"]
    lines = [cells for row in comparison.rows for cells in _with_children(row, 0)]
    lines += [_cells(line, 0) for line in comparison.beside]
    if comparison.verdicts:
        fits = [f"Fits in {gib(comparison.capacity_bytes or 0)} GiB"]
        for verdict in comparison.verdicts:
            fits += [text(verdict.words), ""]
        lines.append(fits + [""] * (len(head) - len(fits)))
    return table(head, "l" + "r" * (len(head) - 1), lines)


def _with_children(line: Line, level: int) -> Iterator[list[str]]:
    yield _cells(line, level)
    if level < 1:  # details are for the page
        for child in children_worth_a_line(line):
            yield from _with_children(child, level + 1)


def _cells(line: Line, level: int) -> list[str]:
    bold = "**" if line.id == "total" else ""
    cells = [f"{bold}{'&nbsp;&nbsp;' * level}{text(line.label)}{bold}"]
    for figure, own in zip(line.at_peak, line.own_peak, strict=True):
        cells += [f"{bold}{_figure(figure)}{bold}", _figure(own)]
    for difference, ratio, change in zip(line.differences, line.ratios, line.changes, strict=True):
        cells += [f"{bold}{text(difference)}{bold}", text(ratio), f"{bold}{text(change)}{bold}"]
    return cells


def _figure(n_bytes: int | None) -> str:
    return "–" if n_bytes is None else text(gib(n_bytes))


def _only_in(entry: OnlyIn, most: int = 8) -> str:
    rows: Sequence[Sequence[str]] = [
        [text(gib(a.bytes)), text(a.words), text(a.category_label), code(a.site)] for a in entry.allocations[:most]
    ]
    body = table(["GiB", "Blocks", "Category", "Made at"], "rlll", rows)
    return f"**{text(entry.title)}** ({text(entry.note)})\n\n{body}"
