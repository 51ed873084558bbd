"""The tiny checkpoint, made once, and quiet libraries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memprof.recording.phases import ACTIVE


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.integrations.runs import checkpoint

    return checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Whatever a test does, torch, transformers and the registry are as before."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from transformers.cache_utils import Cache

    update = vars(Cache)["update"]
    yield
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_pre_hooks
    assert not hooks._global_forward_hooks
    assert vars(Cache)["update"] is update
    assert "resize_" not in vars(torch.UntypedStorage)
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
    assert _get_current_dispatch_mode_stack() == []
    assert ACTIVE == []


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny: a second thread only waits for the first."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMPROF", raising=False)


def wrapped(trainer: Any) -> set[str]:
    """Names of methods that stand on the instance instead of its class."""
    found = set()
    for owner in (trainer, trainer.accelerator):
        found |= {n for n, v in vars(owner).items() if callable(v) and callable(getattr(type(owner), n, None))}
    return found
