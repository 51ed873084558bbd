"""``attach(...).rehearse``: one update on the worst batch, and then the run that would have been."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from memprof.integrations.run_recorder.rehearsal import Rehearsed

from memprof import analyze
from memprof.errors import UsageError
from memprof.instrument.attach import Attachment, _attached, attach

WIDTH, LONG, SHORT = 64, 512, 8


@pytest.fixture(autouse=True)
def nothing_attached() -> Iterator[None]:
    yield
    for watch in reversed(list(_attached.values())):
        watch.detach(dump=False)


class Loop:
    """A loop without a trainer, whose batches have any length."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.1), torch.nn.ReLU())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def update(self, batch: torch.Tensor) -> float:
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def train(self, steps: int = 3) -> list[float]:
        return [self.update(torch.randn(SHORT, WIDTH)) for _ in range(steps)]


def watched(loop: Loop, folder: Path) -> Attachment:
    return attach(loop.model, loop.optimizer, output_dir=folder, rank=0, world_size=1, device="cpu")


def test_the_run_that_follows_is_the_run_that_would_have_been(tmp_path: Path) -> None:
    alone, loop = Loop(), Loop()
    torch.manual_seed(1)
    expected = alone.train()
    watch = watched(loop, tmp_path)
    torch.manual_seed(1)
    found = watch.rehearse(loop.update, torch.ones(LONG, WIDTH))
    assert isinstance(found, Rehearsed)
    assert not loop.optimizer.state
    assert loop.train() == expected
    for mine, theirs in zip(loop.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_peak_is_the_worst_batchs_with_the_optimizers_state(tmp_path: Path) -> None:
    loop = Loop()
    found = watched(loop, tmp_path).rehearse(loop.update, torch.ones(LONG, WIDTH))
    assert found is not None
    assert found.snapshot is not None
    analysis = analyze(found.snapshot)
    parameters = 4 * (WIDTH * WIDTH + WIDTH)
    assert analysis.own_peaks["optimizer_state"] >= 2 * parameters
    assert found.peak_bytes >= 3 * parameters + 2 * 4 * LONG * WIDTH  # weights, moments, two saved activations
    assert {phase["phase"] for phase in analysis.to_dict()["phases"]} >= {"forward", "backward", "optimizer_step"}


def test_out_of_memory_is_written_and_everything_put_back(tmp_path: Path) -> None:
    loop = Loop()
    before = [parameter.clone() for parameter in loop.model.parameters()]

    def step(batch: torch.Tensor) -> None:
        loop.update(batch)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    watch = watched(loop, tmp_path)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        watch.rehearse(step, torch.ones(LONG, WIDTH))
    assert [path.name for path in watch.snapshots] == ["step-000000.rank-0.pickle"]
    assert all(torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))
    assert not loop.optimizer.state


def test_without_an_optimizer_it_is_refused(tmp_path: Path) -> None:
    loop = Loop()
    watch = attach(loop.model, output_dir=tmp_path, rank=0, world_size=1, device="cpu")
    with pytest.raises(UsageError, match="optimizer"):
        watch.rehearse(loop.update, torch.ones(LONG, WIDTH))


def test_switched_off_it_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPROF", "0")
    loop = Loop()
    assert watched(loop, tmp_path).rehearse(loop.update, torch.ones(LONG, WIDTH)) is None
