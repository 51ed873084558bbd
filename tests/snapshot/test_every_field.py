"""Whatever stands in a field of a snapshot, the file is read, with a note, or rejected in one sentence."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path
from typing import Any

import msgspec
import pytest
from memprof.reports.document.build import document_of
from memprof.reports.html.report import render_html

from benchmarks.faults import fields
from memprof.advice.analyze_with_advice import analyze
from memprof.errors import MemprofError
from memprof.report.codec import dumps
from memprof.snapshot import load_snapshot
from memprof.snapshot.recorded_run import RecordedRun
from memprof.snapshot.validation import read_run
from tests.report.files import validate
from tests.reports.document.drawn import render_terminal


def shown(file: Path, drawn: bool = True) -> str:
    """Read a file, and draw its report as text and as a page."""
    analysis = analyze(load_snapshot(file))
    report = analysis.to_dict()
    validate(report)
    if not drawn:
        return dumps(report)
    document = document_of(analysis)
    return render_terminal(document, 100) + render_html(document)


def found(file: Path, raw: dict[str, Any], drawn: bool = True) -> str:
    """Return what is wrong with the answer to a snapshot; empty if nothing is."""
    file.write_bytes(pickle.dumps(raw, protocol=4))
    try:
        text = shown(file, drawn)
        return "an escape" if "\x1b" in text or "\\u001b" in text else ""
    except MemprofError as error:
        return f"not one sentence: {error}" if "\n" in str(error) else ""
    except Exception as error:
        return "".join(traceback.format_exception_only(error)) + traceback.format_tb(error.__traceback__)[-1]


def test_every_field_is_one_that_is_mutated() -> None:
    """The examples are valid, and have every field of the model, nested ones included."""
    notes: list[str] = []
    example, *_ = fields.snapshots()
    run = read_run(example["memprof"], notes)
    assert not notes
    places = {tuple(key for key in place if isinstance(key, str)) for place in fields.fields_of(example)}
    for field in msgspec.structs.fields(RecordedRun):
        assert getattr(run, field.name) not in (None, (), {}), field.name
        assert ("memprof", field.encode_name) in places
    assert ("memprof", "fit", "ensemble", "failed") in places


def test_no_field_ends_in_a_traceback(tmp_path: Path) -> None:
    """One value in each field; :func:`benchmarks.faults.fields.mutants` has forty for each."""
    wrong = {}
    for number, (name, raw) in enumerate(fields.mutants(each=1)):
        if problem := found(tmp_path / "run.pickle", raw, drawn=number % 8 == 0):
            wrong[name] = problem
    assert not wrong


@pytest.mark.parametrize("time", [[5], "5", None, {}, 2**63, -(2**64), 0.5, True])
@pytest.mark.parametrize("at", [0, 1])
def test_an_annotation_without_a_usable_time_is_dropped(tmp_path: Path, time: Any, at: int) -> None:
    *_, raw = fields.snapshots()
    raw["external_annotations"][at]["time_us"] = time
    assert not found(tmp_path / "run.pickle", raw)
    snapshot = load_snapshot(tmp_path / "run.pickle")
    assert len(snapshot.annotations) == 1
    assert snapshot.notes == ["1 entry of 'external_annotations' is not as documented, ignored"]
