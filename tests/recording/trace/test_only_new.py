"""The fixture ``only_new_tensors``: what other tests hold, gradients included, is not in a recording."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memprof import record

OLDER = torch.nn.Linear(512, 512)
OLDER(torch.ones(2, 512)).sum().backward()


@pytest.mark.usefixtures("only_new_tensors")
def test_gradients_of_older_parameters_are_not_recorded(tmp_path: Path) -> None:
    with record(tmp_path / "a.pickle", kind="trace") as session:
        torch.ones(3)
    assert [segment["total_size"] for segment in session.to_raw()["segments"]] == []
    assert OLDER.weight.grad is not None
