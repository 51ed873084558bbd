"""In which part of a step a tensor is made, as both recorders of tensors ask it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from memprof.recording.trace.training_regions import Region


class _Asking(torch.optim.SGD):  # type: ignore[misc]
    """Says inside its step which region that is; may run another optimizer's step first."""

    def __init__(self, region: Region, inner: Any = None) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        self._asked, self._inner = region, inner
        self.heard: list[str] = []

    def step(self, closure: Any = None) -> None:
        if self._inner is not None:
            self._inner.step()
        self.heard.append(self._asked.now(None, False))


def test_a_step_is_the_optimizers_to_its_end_also_around_another_step() -> None:
    region = Region()
    inner = _Asking(region)
    outer = _Asking(region, inner)
    outer.step()
    region.start()
    outer.step()
    assert region.now(None, False) == "outside"
    region.stop()
    outer.step()
    assert outer.heard == inner.heard == ["outside", "optimizer", "outside"]


def test_begun_inside_a_step_the_steps_end_is_no_debt() -> None:
    region = Region()

    class Starting(_Asking):
        def step(self, closure: Any = None) -> None:
            region.start()
            super().step()

    starting, following = Starting(region), _Asking(region)
    starting.step()
    following.step()
    region.stop()
    assert following.heard == ["optimizer"]
    assert region.now(None, False) == "outside"


def test_forward_backward_and_recomputation() -> None:
    region, seen = Region(), []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            seen.extend([region.now(None, False), region.now(None, True)])
            return 2 * grad

    Double.apply(torch.ones(1, requires_grad=True)).backward()
    assert seen == ["backward", "recompute"]
    assert region.now(None, True) == "forward"
    with torch.no_grad():
        assert region.now(None, True) == "no_grad"
    assert region.now("optimizer_step", True) == "optimizer"
