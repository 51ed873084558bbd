"""No string that a file carries reaches a screen as an order to it: every one of them is an attack here, at once."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from markdown_it import MarkdownIt
from memprof.reports.renderers import render

from benchmarks.faults import inputs
from memprof.advice.analyze_with_advice import ReportBuilder, analyze
from memprof.analysis.analysis import Analysis
from memprof.cli import main
from memprof.cli.answers import comparison_answer, report_answer
from memprof.errors import InputError
from tests.report.plain import as_run, compare
from tests.reports.typed import comparison_of, report_of

#: Colours, a link (OSC 8), the clipboard (OSC 52), C1 controls, an overwritten line, turned reading, markup, a script.
ATTACK = (
    "\x1b[31m\x1b]8;;http://evil.example\x07E\x1b]8;;\x07\x1b]52;c;QUFB\x07\x9b31m\x9d52;c;QUFB\x9c\rO\x08\x00"
    "\u202e\u2066\u200f[link=http://evil.example]x[/link]<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
    "](javascript:alert(1))`"
)
# What no screen may be sent: C0 without tab and line's end, C1, and what turns the direction of reading.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def _strings(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        where = (*at, key if isinstance(key, str) else "")  # one of a list stands for all of them
        if isinstance(inner, str):
            yield where, value, key
        yield from _strings(inner, where)


def _planted(places: set[tuple[str, ...]]) -> dict[str, Any]:
    snapshot = copy.deepcopy(inputs.snapshot())
    for where, holder, key in [*_strings(snapshot)]:
        if where in places:
            holder[key] = f"{holder[key]}{ATTACK}"
    return snapshot


def _analysed(snapshot: dict[str, Any], path: Path) -> Analysis:
    path.write_bytes(pickle.dumps(snapshot))
    return analyze(path)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot whose every string that need not be one of a few words attacks, as its name does."""
    path = tmp_path_factory.mktemp("attacked") / ATTACK[:40].replace("/", "")
    rows = _analysed(inputs.snapshot(), path).to_dict()["peak"]["allocations"]
    taken, refusals = set(), []
    for place in {where for where, _, _ in _strings(inputs.snapshot())}:
        try:
            found = _analysed(_planted({place}), path).to_dict()
        except InputError as error:
            refusals.append(str(error))
        else:  # an unknown action or state would only take allocations away
            taken |= {place} if len(found["peak"]["allocations"]) == len(rows) else set()
    assert not [said for said in refusals if CONTROL.search(said)]
    assert len(taken) >= 25
    assert {("memprof", "device", "name"), ("memprof", "node"), ("memprof", "phases", "", "phase")} <= taken
    _analysed(_planted(taken), path)
    return path


@pytest.fixture(scope="module")
def attacked(path: Path) -> Analysis:
    return analyze(path)


@pytest.fixture(scope="module")
def report(attacked: Analysis, path: Path) -> dict[str, Any]:
    found = to_builtins(ReportBuilder().report_of(attacked, path))
    assert "evil" in json.dumps(found), "no attack came as far as the report"
    return found


@pytest.mark.parametrize("style", ["text", "markdown", "json"])
@pytest.mark.parametrize("command", ["report", "explain", "advise"])
def test_a_terminal_and_markdown_are_given_no_orders(command: str, style: str, path: Path) -> None:
    words = [command, str(path), "--format", style, *(["--estimate"] if command == "advise" else [])]
    printed = CliRunner().invoke(main, words)
    assert not printed.exit_code, printed.output
    assert "evil" in printed.stdout or command == "advise"
    assert not CONTROL.search(printed.stderr)
    printed = printed.stdout
    assert not CONTROL.search(printed)
    if style == "markdown":
        _renders_no_attack(printed)


def _renders_no_attack(printed: str) -> None:
    """Read Markdown as its readers do: nothing of the attack is markup, and none of its links is one."""
    for token in MarkdownIt("commonmark", {"html": True}).enable("table").parse(printed):
        for part in (token, *(token.children or ())):
            assert not (part.type.startswith("html") and re.search("script|img|onerror", part.content))
            assert not re.search("evil|javascript", str(part.attrGet("href") or ""))
            assert part.type != "image"


def _holds_no_attack(html: str) -> None:
    assert not CONTROL.search(html)
    assert "<script>alert" not in html
    assert "<img src=x" not in html
    assert "evil.example\"" not in re.sub(r"&quot;", "", html)


def test_a_page_escapes_and_says_which_scripts_may_run(attacked: Analysis, report: dict[str, Any]) -> None:
    html = render(report_answer("report", report_of(report), attacked), "html")
    _holds_no_attack(html)
    policy = re.search(r'http-equiv="?Content-Security-Policy"? content="([^"]+)"', html, re.IGNORECASE)
    assert policy
    assert "default-src 'none'" in policy[1]
    assert "unsafe-eval" not in policy[1]
    scripts = re.search(r"script-src ([^;]*)", policy[1])
    assert scripts is None or "unsafe-inline" not in scripts[1]


def test_a_notebook_escapes(attacked: Analysis) -> None:
    from memprof.reports.notebook import analysis_fragment

    _holds_no_attack(analysis_fragment(attacked))


def test_a_comparison_escapes(attacked: Analysis, report: dict[str, Any]) -> None:
    compared = comparison_of(compare([as_run(f"one{ATTACK}", "measured", report), as_run("two", "measured", report)]))
    for style in ("text", "markdown", "json"):
        assert not CONTROL.search(render(comparison_answer(compared, [None, None]), style))
    _holds_no_attack(render(comparison_answer(compared, [None, None]), "html"))
