"""A loss that couples sequences, patched into TRL's class: seen at once, and its gradient is TRL's all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from trl import GRPOTrainer

from memprof.errors import UsageError
from tests.grpo.trainers import batch, build, groups, loss_and_gradients, tiny_llama, with_policies, worst

pytestmark = pytest.mark.trl

OWN = GRPOTrainer._compute_loss
TOLERANCE = 1e-5


def _logps(trainer: Any, model: Any, inputs: Any) -> torch.Tensor:
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    width = inputs["completion_ids"].shape[1]
    found: torch.Tensor = trainer._get_per_token_logps_and_entropies(model, ids, mask, width)[0]
    return found


def coupled(self: Any, model: Any, inputs: Any) -> torch.Tensor:
    """Penalise how far sequences are from the micro-batch's mean: each one's gradient needs all others'."""
    mask = inputs["completion_mask"]
    each = (_logps(self, model, inputs) * mask).sum(1) / mask.sum(1).clamp(min=1)
    loss: torch.Tensor = OWN(self, model, inputs) + 3.0 * (each - each.mean()).pow(2).sum()
    return loss


def coupled_entropies(self: Any, model: Any, inputs: Any) -> torch.Tensor:
    mask = inputs["completion_mask"]
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    whole = torch.cat([inputs["prompt_mask"], mask], 1)
    found = self._get_per_token_logps_and_entropies(model, ids, whole, mask.shape[1], compute_entropy=True)[1]
    loss: torch.Tensor = OWN(self, model, inputs) + 0.5 * ((found * mask).sum() / mask.sum()).pow(2)
    return loss


def penalty(self: Any, model: Any, inputs: Any) -> torch.Tensor:
    """The weights enter by another way than the log-probabilities."""
    weights = sum((p**2).sum() for p in self.model.parameters() if p.requires_grad)
    loss: torch.Tensor = OWN(self, model, inputs) + 0.01 * weights
    return loss


CASES: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({}, True),
    ({"importance_sampling_level": "sequence"}, True),
    ({"prefix_sharing": True}, True),
    ({"packing": True, "checkpointing": "full"}, False),
]


@pytest.mark.parametrize("patch", [coupled, coupled_entropies], ids=lambda patch: patch.__name__)
@pytest.mark.parametrize(("settings", "off_policy"), CASES, ids=str)
def test_a_patched_term_over_the_whole_batch_has_trls_gradient(
    settings: dict[str, Any], off_policy: bool, patch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    model = tiny_llama()
    theirs, ours = build("trl", model, tmp_path), build("lean", model, tmp_path, max_tokens_per_piece=40, **settings)
    theirs.importance_sampling_level = ours.importance_sampling_level
    inputs = groups(off_policy=off_policy)
    inputs["advantages"][[1, 4]] = 0.0  # no backward in TRL's loss, and one in this
    inputs = with_policies(theirs, inputs, beta=0.0)
    assert "couples sequences" not in caplog.text
    loss_and_gradients(ours, inputs)
    assert "couples sequences" not in caplog.text
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", patch)
    loss, gradients, metrics = loss_and_gradients(theirs, inputs)
    for _ in ("corrected by a second pass", "by two passes"):
        lean_loss, lean_gradients, lean_metrics = loss_and_gradients(ours, inputs)
        assert lean_loss == pytest.approx(loss, rel=TOLERANCE)
        assert worst(lean_gradients, gradients) <= TOLERANCE
        assert lean_metrics.keys() == metrics.keys()
    assert caplog.text.count("the loss couples sequences: the gradient taken by sequence is") == 1
    assert "'two_pass': the loss couples sequences" in "".join(ours._once_log.said)


def test_dropout_is_repeated_where_a_second_pass_corrects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same random numbers twice, what was used and what is added are of the same function."""
    model = tiny_llama(attention_dropout=0.3)
    first, both = (
        build("lean", model, tmp_path, max_tokens_per_piece=40, exact_two_pass=kind) for kind in ("auto", "always")
    )
    inputs = with_policies(first, batch(), beta=0.0)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", coupled)
    found = []
    for trainer in (first, both):
        torch.manual_seed(4)
        found.append(loss_and_gradients(trainer, inputs)[1])
    assert worst(*found) <= TOLERANCE


def test_a_patched_penalty_on_weights_reaches_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    theirs, ours = (build(kind, model, tmp_path) for kind in ("trl", "lean"))
    inputs = with_policies(theirs, batch(), beta=0.0)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", penalty)
    loss, gradients, _ = loss_and_gradients(theirs, inputs)
    lean_loss, lean_gradients, _ = loss_and_gradients(ours, inputs)
    assert lean_loss == pytest.approx(loss, rel=TOLERANCE)
    assert worst(lean_gradients, gradients) <= TOLERANCE


def test_where_two_passes_are_refused_so_is_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = build("lean", tiny_llama(), tmp_path, exact_two_pass="never", max_tokens_per_piece=1)
    inputs = with_policies(ours, batch(), beta=0.0)
    loss_and_gradients(ours, inputs)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", coupled)
    with pytest.raises(UsageError, match=r"couples sequences: .*% of its norm from .*Set exact_two_pass='auto'\.$"):
        loss_and_gradients(ours, inputs)
