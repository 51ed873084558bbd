"""Gradients of bf16 weights over many pieces: rounded once, and where nothing would be lost nothing is held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from memprof.grpo.once_log import OnceLog
from memprof.grpo.step.gradient_sums import gradient_sums
from tests.grpo.trainers import batch, build, groups, loss_and_gradients, run_step, tiny_llama, with_policies, worst

pytestmark = pytest.mark.trl

PIECES, ROWS = {"max_tokens_per_piece": 1}, 64


def distances(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    each = [float((found[name].double() - truth[name]).norm() / truth[name].norm()) for name in truth]
    return sum(each) / len(each)


def test_many_pieces_are_as_near_to_float64_as_trls_whole(tmp_path: Path) -> None:
    model = tiny_llama(torch.bfloat16, initializer_range=0.02)
    exact = build("trl", model.double(), tmp_path)
    inputs = with_policies(exact, batch(ROWS, off_policy=False), beta=0.0)
    truth, model = loss_and_gradients(exact, inputs)[1], model.bfloat16()
    whole = distances(loss_and_gradients(build("trl", model, tmp_path), inputs)[1], truth)
    apart, together = (
        distances(loss_and_gradients(build("lean", model, tmp_path, **PIECES, gradient_sums=kind), inputs)[1], truth)
        for kind in ("never", "fp32")
    )
    assert together <= 1.2 * whole < 1.4 * whole < apart


@pytest.mark.parametrize("settings", [{}, {"prefix_sharing": True}, {"top_entropy_quantile": 0.5}], ids=str)
def test_no_piece_is_lost(settings: dict[str, Any], tmp_path: Path) -> None:
    """Also not what earlier micro-batches have left in ``.grad``, nor the prompts' own backward."""
    found = []
    for kind in ("never", "fp32"):
        trainer = build("lean", tiny_llama(torch.bfloat16), tmp_path, **PIECES, gradient_sums=kind, **settings)
        trainer.model.train()
        for seed in (5, 6):
            inputs = with_policies(trainer, groups(6, seed=seed), beta=0.0)
            run_step(trainer, inputs)
        found.append({name: p.grad.double() for name, p in trainer.model.named_parameters()})
        assert all(p.grad.dtype == torch.bfloat16 for p in trainer.model.parameters())
        assert not any(p._post_accumulate_grad_hooks for p in trainer.model.parameters())
    assert 0 < worst(*found) < 0.05


def test_an_error_leaves_the_gradients_of_before() -> None:
    layer = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    before = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    with pytest.raises(KeyError), gradient_sums("fp32", layer, 3, sharded=False, log=OnceLog()):
        raise KeyError
    assert all(torch.equal(p.grad, before[name]) for name, p in layer.named_parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("wanted", "trained", "pieces", "sharded", "sums"),
    [
        ("auto", 1, 3, False, True),  # a sixtieth of the weights
        ("auto", 16, 3, False, False),
        ("fp32", 16, 3, False, True),
        ("fp32", 16, 2, False, False),
        ("never", 1, 9, False, False),
        ("fp32", 16, 9, True, False),
    ],
)
def test_where_sums_are_held(wanted: str, trained: int, pieces: int, sharded: bool, sums: bool) -> None:
    model, log = torch.nn.Module(), OnceLog()
    for number in range(64):
        weight = torch.nn.Parameter(torch.ones(1024, dtype=torch.bfloat16), requires_grad=number < trained)
        model.register_parameter(f"w{number}", weight)
    with gradient_sums(wanted, model, pieces, sharded=sharded, log=log):
        sum((p * 2).sum() for p in model.parameters() if p.requires_grad).backward()  # type: ignore[union-attr]
        held = next(iter(model.parameters())).grad is None
    assert held == sums
    assert all(torch.equal(p.grad, torch.full_like(p, 2)) for p in model.parameters() if p.requires_grad)
    assert any("in fp32: " in line for line in log.said) == sums


def test_adapters_in_bf16_are_summed_by_default(tmp_path: Path) -> None:
    """As TRL has them over quantised weights; in fp32, PEFT's default, they need no sums."""
    model = tiny_llama(torch.bfloat16, hidden_size=256, intermediate_size=512)
    for dtype in (torch.float32, torch.bfloat16):
        trainer = build("lean", model, tmp_path, lora=True, **PIECES)
        for parameter in trainer.model.parameters():
            parameter.data = parameter.data.to(dtype) if parameter.requires_grad else parameter.data
        loss_and_gradients(trainer, with_policies(trainer, batch(4), beta=0.0))
        assert any("added up in fp32" in line for line in trainer._once_log.said) == (dtype == torch.bfloat16)
