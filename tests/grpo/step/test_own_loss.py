"""A loss with gradients on is TRL's in one graph, unless the training step computes it for its own backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from memprof.errors import UsageError
from tests.grpo import test_rloo
from tests.grpo.trainers import (
    TOLERANCE,
    Rollouts,
    batch,
    build,
    loss_and_gradients,
    run_step,
    tiny_llama,
    with_policies,
    worst,
)

pytestmark = pytest.mark.trl

#: A row is a piece, so that all rows but the last have their backward in the forward.
PIECES = {"max_tokens_per_piece": 1}


def pair_of(method: str, folder: Path, **settings: Any) -> tuple[Any, Any, Any]:
    """Build TRL's trainer, the lean one and a micro-batch for both."""
    make: Any = build if method == "grpo" else test_rloo.build
    theirs = make("trl", tiny_llama(), folder, **settings)
    ours = make("lean", tiny_llama(), folder, **settings, **PIECES)
    policies: Any = with_policies if method == "grpo" else test_rloo.with_old
    return theirs, ours, policies(theirs, batch(), **({"beta": 0.0} if method == "grpo" else {"noise": 0.3}))


def probed(trainer: Any, inputs: Any) -> dict[str, torch.Tensor]:
    """Differentiate the loss of a held-out micro-batch, as a user's probe does."""
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    loss = trainer.compute_loss(trainer.model, dict(inputs))
    found = torch.autograd.grad(loss, list(trained.values()))
    return {"loss": loss.detach(), **dict(zip(trained, found, strict=True))}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_probe_has_all_of_the_gradient_and_leaves_none(method: str, mode: str, tmp_path: Path) -> None:
    theirs, ours, inputs = pair_of(method, tmp_path, gradient_accumulation_steps=2)
    found = []
    for trainer in (theirs, ours):
        trainer.current_gradient_accumulation_steps = 2
        trainer.model.train(mode == "train")
        found.append(probed(trainer, inputs))
        assert all(p.grad is None for p in trainer.model.parameters())
    assert worst(found[1], found[0]) == 0.0
    assert any("outside a training step" in line for line in ours._once_log.said)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_backward_outside_a_step_adds_the_gradient_once(method: str, tmp_path: Path) -> None:
    theirs, ours, inputs = pair_of(method, tmp_path)
    found = []
    for trainer in (theirs, ours):
        trainer.model.train()
        for _ in range(2):
            trainer.compute_loss(trainer.model, dict(inputs)).backward()
        found.append({name: p.grad for name, p in trainer.model.named_parameters()})
    assert worst(found[1], found[0]) == 0.0


class Probe(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Measure the gradient of a held-out micro-batch at one moment of training."""

    def __init__(self, moment: str, trainer: Any, inputs: Any) -> None:
        self.found: list[float] = []
        setattr(self, moment, lambda *_, **__: self.measure(trainer, inputs))

    def measure(self, trainer: Any, inputs: Any) -> None:
        """Note the norm of the gradient."""
        found = probed(trainer, inputs)
        self.found.append(float(torch.stack([part.norm() for name, part in found.items() if name != "loss"]).norm()))


@pytest.mark.parametrize("moment", ["on_step_end", "on_substep_end", "on_pre_optimizer_step", "reward"])
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_probe_while_training_changes_no_parameter(method: str, moment: str, tmp_path: Path) -> None:
    """The same run with a probe and without, and with TRL's trainer; a reward function runs inside a training step."""
    settings = {"gradient_accumulation_steps": 2, "max_steps": 2, "num_iterations": 2}
    weights, norms, rollouts = {}, {}, Rollouts()
    for kind in ("trl", "lean", "unprobed"):
        theirs, ours, inputs = pair_of(method, tmp_path / kind, **settings)
        trainer = theirs if kind == "trl" else ours
        rollouts.record(trainer) if kind == "trl" else rollouts.replay(trainer)
        probe = Probe(moment, trainer, inputs)
        if kind != "unprobed" and moment == "reward":
            reward = trainer.reward_funcs[0]
            trainer.reward_funcs[0] = lambda probe=probe, reward=reward, trainer=trainer, inputs=inputs, **given: (
                probe.measure(trainer, inputs) or reward(**given)
            )
        elif kind != "unprobed":
            trainer.add_callback(probe)
        trainer.train()
        weights[kind] = {name: p.detach() for name, p in trainer.model.named_parameters()}
        norms[kind] = probe.found
    assert norms["trl"]
    assert norms["lean"] == pytest.approx(norms["trl"], rel=1e-4)
    assert worst(weights["lean"], weights["unprobed"]) == 0.0
    assert worst(weights["lean"], weights["trl"]) <= 1e-4


def overriding(trainer: Any, compute_loss: Any) -> Any:
    """Make ``trainer`` one of a user's subclass."""
    trainer.__class__ = type("Users", (type(trainer),), {"compute_loss": compute_loss})
    return trainer


def own_loss(trainer: Any) -> Any:
    """Return the method that a user's subclass calls by ``super()``."""
    return super(type(trainer), trainer).compute_loss


def _logs_a_probe(self: Any, model: Any, inputs: Any, **_: Any) -> Any:
    loss = own_loss(self)(model, inputs)
    self.seen = torch.autograd.grad(own_loss(self)(model, inputs), list(model.parameters()))
    return loss


def _adds_another(self: Any, model: Any, inputs: Any, **_: Any) -> Any:
    other = {**inputs, "advantages": -inputs["advantages"].abs()}
    return own_loss(self)(model, inputs) + 0.25 * own_loss(self)(model, other)


@pytest.mark.parametrize("compute_loss", [_logs_a_probe, _adds_another])
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_second_loss_of_the_step_is_trls(method: str, compute_loss: Any, tmp_path: Path) -> None:
    theirs, ours, inputs = pair_of(method, tmp_path)
    found = [loss_and_gradients(overriding(trainer, compute_loss), inputs) for trainer in (theirs, ours)]
    assert found[1][0] == pytest.approx(found[0][0], rel=TOLERANCE)
    assert worst(found[1][1], found[0][1]) <= TOLERANCE
    if compute_loss is _logs_a_probe:
        assert all(map(torch.allclose, ours.seen, theirs.seen))


def _adds_a_penalty(self: Any, model: Any, inputs: Any, **_: Any) -> Any:
    return own_loss(self)(model, inputs) + 0.1 * sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize("is_scaled", [True, False, 0, None])
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_an_added_term_counts_once_over_accumulated_micro_batches(
    method: str, is_scaled: Any, tmp_path: Path
) -> None:
    """transformers divides what compute_loss returns, or the loss counts the micro-batches itself: as with TRL."""
    theirs, ours, inputs = pair_of(method, tmp_path, gradient_accumulation_steps=2)
    found = []
    for trainer in (theirs, ours):
        trainer.current_gradient_accumulation_steps = 2
        overriding(trainer, _adds_a_penalty).loss_is_scaled_for_ga = is_scaled
        found.append(loss_and_gradients(trainer, inputs))
    assert found[1][0] == pytest.approx(found[0][0], rel=TOLERANCE)
    assert worst(found[1][1], found[0][1]) <= TOLERANCE


def _probes_first(self: Any, model: Any, inputs: Any, **_: Any) -> Any:
    torch.autograd.grad(own_loss(self)(model, inputs), list(model.parameters()), allow_unused=True)
    return own_loss(self)(model, inputs)


def _returns_another(self: Any, model: Any, inputs: Any, **_: Any) -> Any:
    own_loss(self)(model, inputs)
    return own_loss(self)(model, inputs)


@pytest.mark.parametrize(
    ("compute_loss", "what"),
    [(_probes_first, "differentiates the loss"), (_returns_another, "doesn't return the loss")],
)
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_loss_in_pieces_that_is_not_the_steps_is_an_error(
    method: str, compute_loss: Any, what: str, tmp_path: Path
) -> None:
    _, ours, inputs = pair_of(method, tmp_path)
    with pytest.raises(UsageError, match=rf"^An overridden compute_loss {what} .* micro_splitting=False\.$"):
        run_step(overriding(ours, compute_loss), inputs)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_factor_set_on_the_trainer_itself_is_refused(method: str, tmp_path: Path) -> None:
    _, ours, inputs = pair_of(method, tmp_path)
    compute_loss = ours.compute_loss
    ours.compute_loss = lambda *given, **named: 2 * compute_loss(*given, **named)
    with pytest.raises(UsageError, match="override _compute_loss instead"):
        run_step(ours, inputs)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_loss_replaced_in_trls_class_is_used(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is replaced when the trainer exists: its factor counts, as with TRL's trainer."""
    theirs, ours, inputs = pair_of(method, tmp_path)
    compute_loss = type(theirs).compute_loss
    monkeypatch.setattr(type(theirs), "compute_loss", lambda *given, **named: 3 * compute_loss(*given, **named))
    found = [loss_and_gradients(trainer, inputs) for trainer in (theirs, ours)]
    assert found[1][0] == pytest.approx(found[0][0], rel=TOLERANCE)
    assert worst(found[1][1], found[0][1]) <= TOLERANCE
    assert any("is patched" in line for line in ours._once_log.said)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_step_with_an_advantage_that_is_not_a_number_couples_nothing(method: str, tmp_path: Path) -> None:
    _, ours, inputs = pair_of(method, tmp_path)
    inputs["advantages"][1] = float("nan")
    run_step(ours, inputs)
    assert not any("couples" in line for line in ours._once_log.said)


def test_a_probe_before_a_step_that_calls_trls_changes_nothing(tmp_path: Path) -> None:
    _, ours, inputs = pair_of("grpo", tmp_path)

    class Users(type(ours)):  # type: ignore[misc]
        def training_step(self, *given: Any, **named: Any) -> Any:
            return super().training_step(*given, **named)

    ours.__class__ = Users
    probed(ours, inputs)
    assert not any("a backward of its own" in line for line in ours._once_log.said)


def test_a_recording_does_not_count_as_an_override(tmp_path: Path) -> None:
    from memprof import MemProfCallback
    from memprof.grpo.support import is_overridden
    from memprof.grpo.trainer import LeanTrainer

    seen: list[bool] = []

    class Look(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append("compute_loss" in vars(ours))
            seen.append(is_overridden(ours, LeanTrainer, "compute_loss"))

    ours = build("lean", tiny_llama(), tmp_path, max_steps=1)
    ours.add_callback(MemProfCallback(str(tmp_path / "report")))
    ours.add_callback(Look())
    ours.train()
    assert seen == [True, False]
