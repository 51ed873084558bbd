"""A mixture of experts with its router's auxiliary loss: loss, gradients and metrics in pieces are TRL's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from memprof.compat import transformers as names
from memprof.errors import UsageError
from memprof.grpo.loss.load_balancing import LoadBalancing
from tests.grpo import test_rloo
from tests.grpo.trainers import (
    TOLERANCE,
    Rollouts,
    assert_same_step,
    batch,
    build,
    groups,
    logged,
    loss_and_gradients,
    tiny_mixture,
    with_policies,
    worst,
)

pytestmark = pytest.mark.trl

def with_gaps(off_policy: bool = True) -> Any:
    """Padded prompts; one row has no advantage, and one no completion: its prompt's tokens count all the same."""
    inputs = groups(6, off_policy=off_policy)
    inputs["advantages"][2] = 0.0
    inputs["completion_mask"][4] = 0
    return inputs


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"max_tokens_per_piece": 1000}),
    ({}, {"max_tokens_per_piece": 40}),
    ({}, {"max_tokens_per_piece": 1}),
    ({"importance_sampling_level": "sequence", "entropy_coef": 0.1}, {"max_tokens_per_piece": 1000}),
    ({"loss_type": "dapo"}, {"max_tokens_per_piece": 40}),
    ({"loss_type": "bnpo", "top_entropy_quantile": 0.5}, {"max_tokens_per_piece": 40, "packing": True}),
    ({}, {"prefix_sharing": True}),
    ({}, {"max_tokens_per_piece": 40, "checkpointing": "full"}),
    ({}, {"max_tokens_per_piece": 40, "checkpointing": "mlp"}),
    ({}, {"max_tokens_per_piece": 40, "checkpointing": "selective"}),
    ({"gradient_checkpointing": True}, {"max_tokens_per_piece": 40, "exact_two_pass": "always"}),
]


@pytest.mark.parametrize(("family", "lora"), [("mixtral", False), ("qwen3_moe", True)], ids=["full", "lora"])
@pytest.mark.parametrize(("settings", "lean"), CASES, ids=str)
def test_a_step_is_trls(
    settings: dict[str, Any], lean: dict[str, Any], family: str, lora: bool, tmp_path: Path
) -> None:
    model = tiny_mixture(family)
    theirs = build("trl", model, tmp_path, lora=lora, **settings)
    ours = build("lean", model, tmp_path, lora=lora, **settings, **lean)
    assert ours._whole_batch_reason is None
    for trainer in (theirs, ours):
        trainer.current_gradient_accumulation_steps = 3
    for off_policy in (True, False):
        inputs = with_policies(theirs, with_gaps(off_policy), beta=theirs.beta)
        assert_same_step(theirs, ours, inputs)
        assert len(ours._metrics["train"]["aux_loss"]) == 1


def test_the_auxiliary_loss_has_a_part_in_the_gradient(tmp_path: Path) -> None:
    """What the tests above compare is not lost in the rest."""
    with_it = build("lean", tiny_mixture(), tmp_path, max_tokens_per_piece=40)
    without = build("lean", tiny_mixture(), tmp_path, max_tokens_per_piece=40, router_aux_loss_coef=0)
    inputs = with_policies(with_it, batch(), beta=0.0)
    assert worst(*(loss_and_gradients(trainer, inputs)[1] for trainer in (with_it, without))) > 0.1


def test_prompts_alone_have_a_gradient(tmp_path: Path) -> None:
    """All completions were cut off and masked: TRL's step still balances the router, and the head's is zero."""
    theirs, ours = (build(kind, tiny_mixture(), tmp_path) for kind in ("trl", "lean"))
    inputs = batch(3)
    inputs["completion_mask"][:] = 0
    inputs = with_policies(theirs, inputs, beta=0.0)
    found = [loss_and_gradients(trainer, inputs) for trainer in (theirs, ours)]
    assert found[1][0] == pytest.approx(found[0][0], rel=TOLERANCE)
    assert worst(found[1][1], found[0][1]) <= TOLERANCE
    assert any(gradient.norm() > 1e-4 for gradient in found[0][1].values())


@pytest.mark.parametrize("tokens", [1000, 40])
def test_one_piece_takes_one_pass(tokens: int, tmp_path: Path) -> None:
    ours = build("lean", tiny_mixture(), tmp_path, max_tokens_per_piece=tokens)
    inputs, forwards = with_policies(ours, batch(), beta=0.0), list[int]()
    ours.model.model.embed_tokens.register_forward_hook(lambda module, args, out: forwards.append(len(args[0])))
    loss_and_gradients(ours, inputs)  # asks the model again, because its hooks changed
    forwards.clear()
    loss_and_gradients(ours, inputs)
    assert sum(forwards) == (4 if tokens == 1000 else 8)
    scheme = "token" if tokens == 1000 else "two_pass"
    assert any(line.startswith(f"chunks by the scheme '{scheme}'") for line in ours._once_log.said)


def test_rloo_has_it_too(tmp_path: Path) -> None:
    for pieces in (1000, 40):
        theirs = test_rloo.build("trl", tiny_mixture("qwen3_moe"), tmp_path)
        ours = test_rloo.build("lean", tiny_mixture("qwen3_moe"), tmp_path, max_tokens_per_piece=pieces)
        test_rloo.assert_same(theirs, ours, with_gaps())


def test_evaluation(tmp_path: Path) -> None:
    theirs, ours = (build(kind, tiny_mixture(), tmp_path) for kind in ("trl", "lean"))
    inputs, losses = with_policies(theirs, batch(), beta=0.0), []
    for trainer in (theirs, ours):
        trainer.model.eval()
        with torch.no_grad():
            losses.append(trainer.compute_loss(trainer.model, dict(inputs)).item())
    assert losses[1] == pytest.approx(losses[0], rel=TOLERANCE)
    assert ours._metrics["eval"]["aux_loss"] == pytest.approx(theirs._metrics["eval"]["aux_loss"], rel=TOLERANCE)


def test_a_run_tracks_trls(tmp_path: Path) -> None:
    """Two micro-batches a step and each generation used twice, with the reference on the host."""
    rollouts, runs = Rollouts(), []
    tiny_mixture().save_pretrained(tmp_path / "model")
    for kind in ("trl", "lean"):
        settings: dict[str, Any] = {"max_steps": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "beta": 0.04}
        trainer = build(kind, str(tmp_path / "model"), tmp_path, **settings)
        rollouts.record(trainer) if kind == "trl" else rollouts.replay(trainer)
        trainer.train()
        runs.append((logged(trainer), trainer.model.state_dict()))
    (theirs, weights), (ours, lean_weights) = runs
    assert worst(lean_weights, weights) <= 1e-4
    assert "aux_loss" in theirs[0]
    for row, lean_row in zip(theirs, ours, strict=True):
        assert lean_row == pytest.approx(row, rel=1e-3, abs=2e-5, nan_ok=True)


def test_another_formula_takes_trls_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is no sum over tokens cannot be taken apart."""
    owner, name = names.LOAD_BALANCING.place()
    plain = getattr(owner, name)

    def squared(gate_logits: Any, num_experts: int, top_k: int, attention_mask: Any = None) -> Any:
        return plain(gate_logits, num_experts, top_k, attention_mask) ** 2

    monkeypatch.setattr(owner, name, squared)
    theirs, ours = (build(kind, tiny_mixture(), tmp_path, max_steps=1) for kind in ("trl", "lean"))
    assert "TRL's own step is used: transformers' load_balancing_loss_func no longer consists of sums" in caplog.text
    assert "router_aux_loss_coef=0" in caplog.text
    assert_same_step(theirs, ours, with_policies(theirs, batch(), beta=0.0))
    ours.train()
    assert "aux_loss" in ours.state.log_history[0]


def test_two_passes_that_are_refused_leave_trls_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = build("lean", tiny_mixture(), tmp_path, exact_two_pass="never")
    assert ours._whole_batch_reason in caplog.text
    assert "exact_two_pass is 'never'" in caplog.text


def test_a_model_that_trl_cannot_balance_is_refused(tmp_path: Path) -> None:
    """TRL's own step fails for it with an AttributeError."""
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = GraniteMoeForCausalLM(GraniteMoeConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))
    with pytest.raises(UsageError, match=r"auxiliary loss here \(.*num_experts.*\): set router_aux_loss_coef=0\.$"):
        build("lean", model, tmp_path)
    assert build("lean", model, tmp_path, router_aux_loss_coef=0)._whole_batch_reason is None


def test_shares_add_up_to_transformers_loss() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    torch.manual_seed(0)
    logits = [torch.randn(24, 7, requires_grad=True) for _ in range(3)]
    mask = (torch.rand(4, 6) > 0.3).long()
    meant = load_balancing_loss_func(tuple(logits), 7, 2, mask)
    true = torch.autograd.grad(meant, logits)
    balancing, real = LoadBalancing(7, 2), mask.flatten().nonzero()[:, 0]
    pieces = [balancing.routed(logits, part) for part in real.split(5)]
    whole = None
    for piece in pieces:
        whole = piece.plus(whole)
    assert whole is not None
    assert whole.tokens == 3 * len(real)
    found = torch.stack([balancing.share(piece, whole) for piece in pieces]).sum()
    assert found.item() == pytest.approx(meant.item(), rel=1e-6)
    for mine, theirs in zip(torch.autograd.grad(found, logits), true, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-8)
