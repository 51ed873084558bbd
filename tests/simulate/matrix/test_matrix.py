"""Each row of the matrix is answered, the same with and without shortcuts to the byte, or refused in a sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("allpairspy")
pytest.importorskip("trl")

from tests.simulate.families.shapes import four_layers
from tests.simulate.matrix.rows import CACHES, PAIRS, TRIPLES, command

pytestmark = [pytest.mark.trl, pytest.mark.slow]

_KINDS = {"pair": PAIRS, "triple": TRIPLES, "cache": CACHES}
_ROWS = [(f"{kind} {n}", row) for kind, rows in _KINDS.items() for n, row in enumerate(rows)]
# Some of each kind; the rest takes more than half an hour.
_OFTEN = ("pair 0", "pair 3", "pair 28", "triple 20", "cache 0", "cache 4")
_EXECUTED_AT_ITS_ENDS = "generation was executed at its first and last tokens only"
_SAYS_WHAT_TO_DO = re.compile(r"\b(add|drop|use|choose|give|load|need|needs|make|set|install|say)\b", re.IGNORECASE)


def ended(arguments: list[str], out: Path) -> tuple[int, str, dict[str, Any] | None]:
    """Run ``memprof simulate``: its exit code, what it says on stderr, its report."""
    from memprof.cli import main

    done = CliRunner().invoke(main, ["simulate", *arguments, "--json", str(out)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stderr, json.loads(out.read_text()) if out.exists() else None


def held(report: dict[str, Any]) -> Any:
    """Return the bytes that a shortcut must not change."""
    peak = report["peak"]
    phases = [(p["phase"], p["step"], p["peak_bytes"], p["peak_reserved_bytes"]) for p in report["phases"]]
    return peak["allocated_bytes"], peak["reserved_bytes"], peak["active_bytes"], phases, report["oom"] is not None


def check(row: dict[str, str], folder: Path) -> str:
    """Hold a row to what is promised of it; return how it ended."""
    (folder / "config.json").write_text(json.dumps(four_layers(row.get("family", "qwen2"))))
    (folder / "half.yaml").write_text(row.get("precision", ""))
    arguments = command(row, str(folder))
    code, said, report = ended(arguments, folder / "with.json")
    if report is None:
        sentence = said.strip().rpartition("\n")[2]
        assert code in (2, 3), (arguments, said)
        assert _SAYS_WHAT_TO_DO.search(sentence), (arguments, sentence)
        assert "cannot use this model" not in sentence, (arguments, sentence)  # a library's error, not a refusal
        return f"refused: {sentence}"
    assert code in (0, 4), (arguments, said)
    notes = " ".join(report["notes"])
    assert "simulated without" not in notes, (arguments, notes)
    if _EXECUTED_AT_ITS_ENDS in notes:
        return "answered, its generation at its ends only"
    code, said, plain = ended([*arguments, "--no-shortcuts"], folder / "without.json")
    assert plain is not None, (arguments, said)
    assert held(plain) == held(report), arguments
    return "answered"


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=name, marks=[] if name in _OFTEN else [pytest.mark.heavy]) for name, row in _ROWS],
)
def test_a_row_is_answered_or_refused(row: dict[str, str], tmp_path: Path) -> None:
    assert check(row, tmp_path)
