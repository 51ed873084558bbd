"""An optimizer's step that runs out of memory computes what it would have, or ends in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memprof.grpo.once_log import OnceLog
from memprof.grpo.step.optimizer_step import RetryingStep
from memprof.grpo.step.out_of_memory import Adaptation
from memprof.grpo.techniques.rounding import StochasticAdamW
from tests.grpo.step.test_out_of_memory import RunsOut
from tests.grpo.trainers import build, tiny_llama

pytestmark = pytest.mark.trl

KINDS: dict[str, tuple[Any, torch.dtype, dict[str, Any]]] = {
    "fused": (torch.optim.AdamW, torch.float32, {"fused": True}),
    "foreach": (torch.optim.AdamW, torch.float32, {"foreach": True}),
    "one by one": (torch.optim.SGD, torch.float32, {"momentum": 0.9, "foreach": False}),
    "rounded": (StochasticAdamW, torch.bfloat16, {"seed": 3}),
}


def stepped(kind: str, *at: int, parks: bool = False) -> tuple[list[torch.Tensor], RunsOut, str]:
    """Step three times; operators ``at`` of the first step run out of memory. Return weights, and what was said.

    ``parks``: the state goes to host memory between the first step and the second.
    """
    make, dtype, options = KINDS[kind]
    source = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(5, 3 + i, generator=source).to(dtype)) for i in range(4)]
    optimizer = make([{"params": weights[:2]}, {"params": weights[2:], "weight_decay": 0.0}], lr=0.1, **options)
    adaptation = Adaptation(OnceLog(), lambda: None, lambda: None)
    adaptation.clear = lambda: None  # type: ignore[method-assign]  # it collects garbage, which takes a while
    mode, own = RunsOut(*at), optimizer.step

    def short(*given: Any) -> Any:
        with mode:
            return own(*given)

    optimizer.step = short
    step = RetryingStep(optimizer, adaptation)
    for number in range(3):
        for weight in weights:
            drawn = torch.randn(weight.shape, generator=source).to(dtype)
            weight.grad = drawn if number or weight is not weights[1] else None
        step()
        if parks:
            assert step.park() is (number == 0 and kind in ("fused", "rounded"))
    return [weight.detach() for weight in weights], mode, " ".join(sorted(adaptation.log.said))


@pytest.mark.parametrize("kind", KINDS)
def test_at_every_operator_of_the_steps(kind: str) -> None:
    meant, counted, _ = stepped(kind)
    lived, ended = 0, list[str]()
    for at in range(1, counted.seen, 1 if kind == "fused" else 4):
        for points in ((at,), (at, at + 1), (at, at + 2)):
            try:
                found, mode, said = stepped(kind, *points)
            except torch.OutOfMemoryError as error:
                ended.append(str(error))
                continue
            assert mode.raised
            assert "out of memory in the optimizer's step" in said
            assert all(torch.equal(a, b) for a, b in zip(found, meant, strict=True))
            lived += 1
    assert all("The lean trainer ran out of memory in" in said for said in ended)
    assert bool(lived) == (kind in ("fused", "rounded"))


def test_state_that_has_no_room_stays_on_the_host() -> None:
    meant, _, _ = stepped("fused")
    found, mode, said = stepped("fused", 1, 2)
    assert mode.raised == 2
    assert "stays in host memory" in said
    assert all(torch.equal(a, b) for a, b in zip(found, meant, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_parked_once_where_a_step_can_go_on_from_there(kind: str) -> None:
    meant, _, _ = stepped(kind)
    found, _, _ = stepped(kind, parks=True)
    assert all(torch.equal(a, b) for a, b in zip(found, meant, strict=True))


def test_the_trainers_optimizer_survives_and_counts_as_stepped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """The learning rate's scheduler warns where a step goes by it."""
    ours = build("lean", tiny_llama(), tmp_path, on_oom="adapt", max_steps=2)
    own, raised = torch.optim.AdamW.step, []

    def step(self: Any, *given: Any) -> Any:
        if len(raised) < 2:
            raised.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return own(self, *given)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    ours.create_optimizer_and_scheduler(2)  # as a user may, before anything has wrapped the optimizer
    once = ours.optimizer.step
    assert ours.create_optimizer().step is once
    ours.train()
    assert any("stays in host memory" in line for line in ours._once_log.said)
    assert ours._adaptation.park.__self__.__class__ is RetryingStep
    assert not [one for one in recwarn if "lr_scheduler.step" in str(one.message)]


def test_a_step_that_has_room_is_one_call_of_the_optimizers() -> None:
    """Hooks on its step see what they would: an average of the weights is updated once, whatever the groups."""
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": [one]} for one in weights], fused=True)
    for weight in weights:
        weight.grad = torch.ones(3)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(len(optimizer.state)))
    step = RetryingStep(optimizer, Adaptation(OnceLog(), lambda: None, lambda: None))
    for _ in range(2):
        step()
    assert calls == [2, 2]


@pytest.mark.parametrize("has_steps", [True, False])
def test_a_group_is_stepped_once_though_another_has_no_room(has_steps: bool) -> None:
    """Where the second has state of earlier steps, nobody can tell whether this one has changed it."""
    meant, found = ([torch.nn.Parameter(torch.ones(3)) for _ in range(2)] for _ in range(2))
    for weights in (meant, found):
        optimizer = torch.optim.AdamW([{"params": [one]} for one in weights], fused=True)
        step: Any = RetryingStep(optimizer, Adaptation(OnceLog(), lambda: None, lambda: None))
        if has_steps:
            weights[1].grad = torch.ones(3)
            step()
        for weight in weights:
            weight.grad = torch.ones(3)
        if weights is found:
            counted = RunsOut()
            own = step._step

            def short(*given: Any, own: Any = own, mode: RunsOut = counted) -> Any:
                with mode:
                    return own(*given)

            step._step = short
            counted.at = {3} if has_steps else {8}
            if has_steps:
                with pytest.raises(torch.OutOfMemoryError, match="had begun to change weights"):
                    step()
                return
        step()
    assert counted.raised
    assert all(torch.equal(a, b) for a, b in zip(found, meant, strict=True))
