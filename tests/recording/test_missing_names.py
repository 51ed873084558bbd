"""Record where torch lacks a name the recorder uses: refused in a sentence, or noted in what is written."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
import torch

import memprof
from memprof.compat import torch as torch_names
from memprof.compat.targets import Target
from memprof.errors import UsageError
from tests.compat.removal import remove


def _notes(path: Path) -> list[str]:
    with path.open("rb") as file:
        notes: list[str] = pickle.load(file)["memprof"]["notes"]
    return notes


@pytest.mark.parametrize("target", [torch_names.POP_MODE, torch_names.GATHER_STACK, torch_names.STORAGE_RESIZE])
def test_recording_is_refused_without_what_it_needs(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(target, monkeypatch)
    with pytest.raises(UsageError, match=r"^CPU recording was tested with PyTorch .*is not in the PyTorch that"):
        memprof.record(tmp_path / "run.pickle", device="cpu").__enter__()
    assert not list(tmp_path.iterdir())


def test_attaching_is_refused_without_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove(torch_names.GRAPH_TASK, monkeypatch)
    with pytest.raises(UsageError, match=r"^memprof\.attach was .*_current_graph_task_id is not in "):
        memprof.attach(torch.nn.Linear(2, 2), output_dir=tmp_path)
    assert memprof.attached() is None


def test_what_an_attached_worker_does_without_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        remove(torch_names.BACKWARD, patch)
        watch = memprof.attach(torch.nn.Linear(2, 2), output_dir=tmp_path)
    path = watch.detach()
    assert path is not None
    words = "Phase backward cannot be marked: backward is not in the PyTorch that is installed"
    assert any(note.startswith(words) for note in _notes(path))


def test_a_recording_inside_another_is_not_taken_for_a_changed_torch(tmp_path: Path) -> None:
    """The outer one has put a function of its own in the place of one that the inner one checks."""
    inner = tmp_path / "inner.pickle"
    with memprof.record(tmp_path / "outer.pickle", device="cpu"), memprof.record(inner, device="cpu"):
        torch.ones(8)
    assert _notes(inner) == []


def test_a_module_that_is_being_imported_lacks_nothing_yet() -> None:
    """Hooks of ``memprof run`` look at what is loaded while somebody's import goes on."""
    target = Target("json", "no_such_name", needed_by=("run",))
    assert target.is_loaded
    spec = sys.modules["json"].__spec__
    assert spec is not None
    spec.__dict__["_initializing"] = True
    try:
        assert not target.is_loaded
    finally:
        del spec.__dict__["_initializing"]
