"""A recording has the text of the program's own files that its stacks name, within bounds, and never if redacted."""

from __future__ import annotations

import importlib.util
import linecache
import sys
from pathlib import Path
from typing import Any

import pytest

from memprof.recording.system import sources
from memprof.recording.system.sources import program_sources
from memprof.redact import redact_snapshot
from memprof.snapshot import load_snapshot

PROGRAM = """\
import torch


def work():
    return torch.ones(1 << 20)
"""


def raw_of(*files: str) -> dict[str, Any]:
    events = [{"action": "alloc", "frames": [{"filename": file, "line": 1, "name": "f"}]} for file in files]
    return {"segments": [], "device_traces": [events]}


def test_a_recording_has_the_programs_file_and_no_librarys(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import memprof
    from memprof import record

    (tmp_path / "program.py").write_text(PROGRAM)
    spec = importlib.util.spec_from_file_location("program", tmp_path / "program.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    with record(tmp_path / "run.pickle", device="cpu"):
        held = program.work()
    assert isinstance(held, torch.Tensor)
    run = load_snapshot(tmp_path / "run.pickle").run
    texts = {Path(file.path).name: file.text for file in run.sources}
    assert texts["program.py"] == PROGRAM
    library = str(Path(memprof.__file__).parent)
    assert not [f.path for f in run.sources if "site-packages" in f.path or f.path.startswith(library)]


def test_files_are_bounded_and_what_is_cut_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LARGEST_FILE", 40)
    monkeypatch.setattr(sources, "LARGEST_SUM", 70)
    files = []
    for name in "abc":
        files.append(tmp_path / f"{name}.py")
        files[-1].write_text("value = 'ä'\n" * 5, encoding="utf-8")
    found = program_sources(raw_of(*map(str, files)), started=2e9)
    assert [(Path(one["path"]).name, len(one["text"].encode()), one["cut"]) for one in found] == [
        ("a.py", 39, True), ("b.py", 26, True),
    ]  # fmt: skip
    assert all(one["text"].endswith("\n") and not one["edited"] for one in found)
    assert program_sources(raw_of(str(files[0])), started=0.0)[0]["edited"]


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "odd.py").write_bytes(b"# -*- coding: nonsense -*-\n")
    files = [str(tmp_path / name) for name in ("binary.py", "odd.py", "absent.py")]
    library = sys.modules["os"].__file__ or ""
    assert program_sources(raw_of(*files, "<string>", library), 0) == []


def test_a_notebooks_cell_is_read_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linecache.cache, "/tmp/ipykernel_1/2.py", (6, None, ["x = 1\n"], "/tmp/ipykernel_1/2.py"))
    assert program_sources(raw_of("/tmp/ipykernel_1/2.py"), 0)[0]["text"] == "x = 1\n"


def test_a_redacted_snapshot_has_no_source() -> None:
    raw = {**raw_of(), "memprof": {"sources": [{"path": "/home/me/a.py", "text": "secret"}]}}
    redact_snapshot(raw)
    assert "sources" not in raw["memprof"]
