"""Snapshots inside memory_viz's pages and torch.save's files."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from base64 import b64encode
from pathlib import Path

import pytest

from memprof.errors import InputError, UnsafePickle
from memprof.snapshot import load_snapshot
from tests.synthetic import SnapshotBuilder


def raw() -> dict[str, object]:
    run = SnapshotBuilder()
    run.alloc(3 << 20, "main")
    return run.raw()


def page(data: bytes) -> str:
    padded = data + b"\x00" * (3 - len(data) % 3)
    files = json.dumps([{"name": "snapshot.pickle", "base64": b64encode(padded).decode()}])
    return f'\n<!DOCTYPE html>\n<script type="module">\nconst local_files = {files}\n</script>'


def saved(data: bytes, entry: str = "archive/data.pkl") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(entry, data)
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


def test_a_page_of_memory_viz(tmp_path: Path) -> None:
    for text, number in ((page(pickle.dumps(raw())), None), (page(pickle.dumps(raw())), 1)):
        (tmp_path / "trace_plot.html").write_text(text)
        assert len(load_snapshot(tmp_path / "trace_plot.html", number).traces[0]) == 2


def test_a_dictionary_that_torch_saved(tmp_path: Path) -> None:
    (tmp_path / "snapshot.pt").write_bytes(saved(pickle.dumps(raw(), protocol=2)))
    assert len(load_snapshot(tmp_path / "snapshot.pt").traces[0]) == 2


def test_torch_itself_wrote_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    viz = pytest.importorskip("torch.cuda._memory_viz")
    torch.save(raw(), tmp_path / "snapshot.pt")
    (tmp_path / "segments.html").write_text(viz.segment_plot(raw()))
    for name in ("snapshot.pt", "segments.html"):
        assert len(load_snapshot(tmp_path / name).traces[0]) == 2


def test_nothing_else_in_them_is_loaded(tmp_path: Path) -> None:
    unsafe = pickle.dumps(print)
    (tmp_path / "unsafe.pt").write_bytes(saved(unsafe))
    (tmp_path / "unsafe.html").write_text(page(unsafe))
    (tmp_path / "other.zip").write_bytes(saved(b"", "readme.txt"))
    (tmp_path / "plain.html").write_text("<html>nothing here</html>")
    (tmp_path / "cut.pt").write_bytes(saved(pickle.dumps(raw()))[:200])
    for name in ("unsafe.pt", "unsafe.html"):
        with pytest.raises(UnsafePickle):
            load_snapshot(tmp_path / name)
    for name in ("other.zip", "plain.html", "cut.pt"):
        with pytest.raises(InputError):
            load_snapshot(tmp_path / name)
