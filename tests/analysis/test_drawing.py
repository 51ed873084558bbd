"""An analysis draws itself however it was obtained: nothing has to be imported or registered first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.synthetic import SnapshotBuilder

_PROGRAM = """
import sys
from {home} import analyze

analysis = analyze(sys.argv[1])
assert not any(name.startswith("memprof.reports") for name in sys.modules), "drawing is loaded when it is asked for"
for drawn in (analysis, analysis.peak, analysis.largest(3)):
    assert drawn._repr_html_().startswith("<div")
assert analysis.to_html(sys.argv[2]).read_text(encoding="utf-8").lower().startswith("<!doctype html>")
"""


@pytest.mark.parametrize("home", ["memprof", "memprof.advice.analyze_with_advice", "memprof.analysis.analysis"])
def test_in_a_fresh_process(tmp_path: Path, home: str) -> None:
    run = SnapshotBuilder()
    run.alloc(2**20, "forward", "main")
    snapshot = run.save(tmp_path / "run.pickle")
    program = _PROGRAM.format(home=home)
    done = subprocess.run(
        [sys.executable, "-c", program, str(snapshot), str(tmp_path / "page.html")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
