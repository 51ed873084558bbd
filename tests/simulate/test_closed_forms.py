"""Where arithmetic gives an answer, the simulation gives the same one, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest

from memprof.vocabulary import Category, Evidence
from tests.simulate.conftest import TINY

H, F, L, V = TINY["hidden_size"], TINY["intermediate_size"], TINY["num_hidden_layers"], TINY["vocab_size"]
KV = TINY["num_key_value_heads"] * TINY["head_dim"]  # type: ignore[operator]
LAYER = 2 * H * H + 2 * H * KV + 3 * H * F + 2 * H  # type: ignore[operator]
PARAMETERS = 2 * V * H + L * LAYER + H  # type: ignore[operator]
ROPE = TINY["head_dim"] // 2 * 4 * 2  # type: ignore[operator]  # two fp32 buffers of inverse frequencies
R = 3
LORA = L * R * ((H + H) * 2 + (H + KV) * 2 + (H + F) * 3)  # type: ignore[operator]  # every linear layer but the head


@lru_cache(maxsize=8)
def _analysis(settings: Any) -> Any:
    from memprof.analysis.analysis import analyze
    from memprof.simulate.run import simulate_settings
    from memprof.snapshot.reader import snapshot_from_raw

    return analyze(snapshot_from_raw(simulate_settings(settings)))


def _requested(analysis: Any, category: str) -> int:
    """The highest requested bytes over the run of what is known, by its owner, to be of the category."""
    import numpy as np

    line, found = analysis.timeline, analysis.attribution
    mine = (found.category == Category(category).code) & (found.evidence == Evidence.OWNER.code)
    change = np.zeros(line.n_events + 2, np.int64)
    for row in np.flatnonzero(mine):
        born = line.alloc_event[row] + 1 if line.alloc_event[row] >= 0 else 0
        died = line.free_event[row] + 1 if line.free_event[row] >= 0 else line.n_events + 1
        change[born] += line.requested[row]
        change[died] -= line.requested[row]
    return int(np.cumsum(change).max())


def test_full_training_holds_what_arithmetic_says(settings_for: Callable[..., Any]) -> None:
    found = _analysis(settings_for(generation="none", gradient_checkpointing=False))
    assert _requested(found, "weights") == 4 * PARAMETERS + ROPE
    assert _requested(found, "optimizer_state") == 2 * 4 * PARAMETERS  # counts of steps are the host's
    owned = [r for r in found.explain("phase:optimizer_step", category="gradients") if r.evidence == "owner"]
    assert sum(r.requested_bytes for r in owned) == 4 * PARAMETERS


def test_counts_of_steps_are_the_hosts_where_dynamo_was_imported(settings_for: Callable[..., Any]) -> None:
    """torch._dynamo gives AdamW a method of its own, which it inherits otherwise; tests run in either order."""
    import torch._dynamo.eval_frame

    torch._dynamo.eval_frame.TorchPatcher.patch()
    found = _analysis(settings_for(generation="none", gradient_checkpointing=False))
    assert _requested(found, "optimizer_state") == 2 * 4 * PARAMETERS


def test_fused_adam_counts_its_steps_on_the_device(settings_for: Callable[..., Any]) -> None:
    found = _analysis(settings_for(generation="none", optim="adamw_torch_fused", gradient_checkpointing=False))
    steps = 4 * (9 * L + 3)  # one fp32 number a parameter
    assert _requested(found, "optimizer_state") == 2 * 4 * PARAMETERS + steps


def test_a_reference_is_a_second_set_of_weights(settings_for: Callable[..., Any]) -> None:
    found = _analysis(settings_for(generation="none", beta=0.1, dtype="bfloat16"))
    assert _requested(found, "weights") == _requested(found, "reference_model") == 2 * PARAMETERS + ROPE


def test_lora_trains_what_arithmetic_says(settings_for: Callable[..., Any]) -> None:
    found = _analysis(settings_for(generation="none", lora_r=R, dtype="bfloat16"))
    assert _requested(found, "weights") == 2 * PARAMETERS + ROPE
    assert _requested(found, "adapters") == 4 * LORA
    assert _requested(found, "optimizer_state") == 8 * LORA


def test_the_cache_holds_what_arithmetic_says(settings_for: Callable[..., Any]) -> None:
    settings = settings_for(dtype="bfloat16")
    tokens = settings.sequence_length - 1  # the last token is sampled, never fed back
    per_layer = settings.per_device_train_batch_size * KV * 2  # bytes of one token's keys
    # While the last layer's values are being concatenated, the old ones (a token shorter) are there too.
    assert _requested(_analysis(settings), "kv_cache") == per_layer * (2 * L * tokens + (tokens - 1))


def test_full_logits_are_materialised(settings_for: Callable[..., Any]) -> None:
    settings = settings_for(generation="none", recipe="trl-full-logits", dtype="bfloat16")
    found = _analysis(settings)
    code = Category.LOSS_LOGITS.code
    sizes = {int(n) for n, c in zip(found.timeline.requested, found.attribution.category, strict=True) if c == code}
    rows = settings.per_device_train_batch_size
    assert rows * (settings.completion_length + 1) * V * 2 in sizes  # type: ignore[operator]  # the head's, in bfloat16
    assert rows * (settings.completion_length + 1) * V * 4 in sizes  # type: ignore[operator]  # accelerate's fp32 copy
    assert rows * settings.completion_length * V * 4 in sizes  # type: ignore[operator]  # divided by the temperature


def test_the_first_release_kept_the_policys_rows_beside_the_references_logits(
    settings_for: Callable[..., Any],
) -> None:
    settings = settings_for(generation="none", recipe="trl-0.14", dtype="bfloat16", beta=0.1)
    line = _analysis(settings).timeline
    rows, keep = settings.per_device_train_batch_size, settings.completion_length
    born, died = line.alloc_event, line.free_event
    kept = line.requested == keep * V * 4  # type: ignore[operator]  # a row's log_softmax, in float32
    logits = line.requested == rows * (keep + 1) * V * 4  # type: ignore[operator]  # as accelerate converts them
    beside = [int((kept & (born < born[i]) & (died > died[i])).sum()) for i in logits.nonzero()[0]]
    # In each of the two steps: the policy's, the reference's beside all rows of the policy, and logits' gradient.
    assert beside == 2 * [0, rows, 0]


@pytest.mark.parametrize(
    ("optim", "per_value", "per_block"), [("adamw_torch_8bit", 2.0, 8 / 256), ("adamw_torch_4bit", 1.0, 8 / 128)]
)
def test_few_bit_optimizers_hold_what_their_layout_says(
    settings_for: Callable[..., Any], optim: str, per_value: float, per_block: float
) -> None:
    found = _analysis(settings_for(generation="none", optim=optim))
    big = [n for n in _sizes() if n >= 4096]
    small = [n for n in _sizes() if n < 4096]
    exact = sum(int(per_value * n) for n in big) + 8 * sum(small)
    blocks = sum(2 * 4 * -(-n // int(8 / per_block)) for n in big)
    assert _requested(found, "optimizer_state") == exact + blocks + 2 * 256 * 4


def _sizes() -> list[int]:
    layer = [H * H, H * KV, H * KV, H * H, H * F, H * F, H * F, H, H]  # type: ignore[operator]
    return [V * H, *(layer * L), H, V * H]  # type: ignore[operator, list-item]


def test_paged_state_is_the_hosts(settings_for: Callable[..., Any]) -> None:
    from memprof.simulate.run import simulate_settings

    raw = simulate_settings(settings_for(generation="none", optim="paged_adamw_32bit"), stacks=False)
    # Only tensors of 100 000 values and more are paged; the tiny model's largest has 48 000.
    assert raw["memprof"]["host"]["managed_bytes"] == 0
