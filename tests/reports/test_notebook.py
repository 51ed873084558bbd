"""What a notebook shows, in a real notebook that a real kernel executes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from memprof.reports.notebook import document_fragment

from memprof import analyze
from memprof.errors import InputError
from tests.attribution.runs import Run, train
from tests.reports.typed import build_document
from tests.synthetic import SnapshotBuilder

MIB = 2**20


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small training run, as a file."""
    run = Run()
    train(run)
    path: Path = run.builder.save(tmp_path_factory.mktemp("run") / "run.pickle")
    return path


def executed(cells: list[str], folder: Path) -> list[list[dict[str, Any]]]:
    """The outputs of each cell, after a kernel ran them in ``folder``."""
    nbformat = pytest.importorskip("nbformat", reason="no notebooks here: pip install -e .[dev]")
    nbclient = pytest.importorskip("nbclient", reason="no notebooks here: pip install -e .[dev]")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    nbformat.write(notebook, folder / "executed.ipynb")
    return [cell.outputs for cell in notebook.cells]


def html_of(outputs: list[dict[str, Any]]) -> str:
    return str(next(o["data"]["text/html"] for o in outputs if "text/html" in o.get("data", {})))


def test_a_notebook_shows_table_bar_and_page(snapshot: Path, tmp_path: Path) -> None:
    whole, peak, largest, page, quick = executed(
        [
            f"from memprof import analyze\nanalysis = analyze({str(snapshot)!r})\nanalysis",
            "analysis.peak",
            "analysis.largest(3)",
            "analysis.to_html('report.html')",
            "import sys\nprint('torch' in sys.modules)",
        ],
        tmp_path,
    )
    expected = analyze(snapshot)
    number = f"{expected.peak.allocated_bytes / MIB:.0f}"
    assert int(number) > 100
    for shown in (html_of(whole), html_of(peak)):
        assert number in shown
        widths = [float(w) for w in re.findall(r"width:([\d.]+)%", shown)]
        assert sum(widths) == pytest.approx(100, abs=0.1)
        assert len(widths) == sum(n > 0 for n in expected.peak.categories.values())
    assert html_of(largest).count("<tr>") == 4
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert "report.html" in page[0]["data"]["text/plain"]
    assert quick[0]["text"] == "False\n"


def test_out_of_memory_shows_the_failure_the_card_and_the_advice(tmp_path: Path) -> None:
    run = SnapshotBuilder()
    run.alloc(512 * MIB, "forward")
    run._event("oom", 0, 64 * MIB, [])
    run.events[-1]["device_free"] = 16 * MIB
    analysis = analyze(run.save(tmp_path / "run.pickle"))
    shown = analysis._repr_html_()
    assert "Out by 48.0 MiB" in shown
    assert "64.00 MiB were asked for" in shown
    assert "the GPU at least" in shown
    report = {**analysis.to_dict(), "capacity": {"bytes": 1024 * MIB, "from": "option"}}
    report["headline"]["action"] = "Try first: halve it."
    shown = document_fragment(build_document(report))
    assert "of 1.00 GiB" in shown
    assert "Try first: halve it." in shown


def test_repr_says_the_peak(snapshot: Path) -> None:
    analysis = analyze(snapshot)
    assert re.fullmatch(r"Analysis\(peak of [\d.]+ [KMG]iB in [a-z_]+(, step \d+)?, [\d,]+ events\)", repr(analysis))


def test_largest_groups_what_is_alike_before_it_counts(tmp_path: Path) -> None:
    run = SnapshotBuilder()
    for _ in range(100):
        run.ghost(MIB)
    run.ghost(20 * MIB)
    rows = analyze(run.save(tmp_path / "run.pickle")).largest(1)
    assert [(row.count, row.bytes) for row in rows] == [(100, 100 * MIB)]


def test_names_from_strangers_stay_text(tmp_path: Path) -> None:
    run = Run()
    run.alloc(MIB, ["<img/src=x/onerror=alert(1)>.py:1 <b>f</b>"])
    analysis = analyze(run.builder.save(tmp_path / "run.pickle"))
    for shown in (analysis._repr_html_(), analysis.peak._repr_html_(), analysis.largest()._repr_html_()):
        assert "<img" not in shown
        assert "<b>f" not in shown


def test_a_page_that_cannot_be_written_is_one_sentence(snapshot: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="directory"):
        analyze(snapshot).to_html(tmp_path / "missing" / "report.html")
