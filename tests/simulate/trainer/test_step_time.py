"""What a simulated step computes and moves, and how long that takes on a card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from memprof.config.gpus import find_gpu, known_gpus
from memprof.config.speeds import speed_of
from tests.simulate.conftest import TINY

torch = pytest.importorskip("torch")

BATCH, PROMPT, COMPLETION = 4, 11, 21
HIDDEN, INNER, LAYERS, VOCABULARY = 48, 136, 2, 1000
WIDTH = TINY["num_attention_heads"] * TINY["head_dim"]  # type: ignore[operator]
LAYER = 2 * (HIDDEN * WIDTH * 2 + HIDDEN * 16 * 2 + 3 * HIDDEN * INNER)  # FLOPs a token of one layer's matrices
HEAD = 2 * HIDDEN * VOCABULARY


def work_of(settings: Any, monkeypatch: pytest.MonkeyPatch, gpu: str = "H100") -> dict[str, Any]:
    """Simulate, and return the tallies that the estimate was made of."""
    from memprof.simulate import run, step_time

    seen: dict[str, Any] = {}
    original = step_time.estimated_time

    def keep(work: Any, *given: Any, **named: Any) -> Any:
        seen.update(work)
        return original(work, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(step_time, "estimated_time", keep)
        raw = run.simulate_settings(settings, gpu=find_gpu(gpu), stacks=False)
    seen["estimate"] = raw["memprof"]["estimated_time"]
    return seen


def half_flops(tally: Any) -> float:
    return float(sum(half * times for (half, _, _), times in tally.kernels.items()))


def attention(queries: int, keys: int) -> int:
    return 4 * WIDTH * queries * keys * LAYERS


def test_generation_counts_every_token(settings_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    work = work_of(settings_for(dtype="bfloat16"), monkeypatch)
    prompt = PROMPT * LAYERS * LAYER + HEAD + attention(PROMPT, PROMPT)
    decoded = sum(LAYERS * LAYER + HEAD + attention(1, PROMPT + i) for i in range(1, COMPLETION))
    # Between the first and the last tokens each counts as their average: half a token's attention less.
    assert half_flops(work["generate"]) == pytest.approx(BATCH * (prompt + decoded), rel=1e-3)


def test_training_computes_what_its_matrices_say(
    settings_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, kept = PROMPT + COMPLETION, COMPLETION
    matrices = tokens * LAYERS * LAYER + kept * HEAD
    plain = work_of(settings_for(dtype="bfloat16", gradient_checkpointing=False), monkeypatch)
    checkpointed = work_of(settings_for(dtype="bfloat16"), monkeypatch)
    forward = BATCH * (matrices + attention(tokens, tokens))
    assert half_flops(plain["forward"]) == half_flops(checkpointed["forward"]) == forward
    # flash-attention's backward is five products where its forward is two, and recomputes the scores
    head = BATCH * kept * HEAD  # TRL computes the logits again in backward
    assert half_flops(plain["backward"]) == BATCH * (2 * matrices + attention(tokens, tokens) * 5 / 2) + head
    # A layer's last product is not computed again: torch stops when all that was saved is there.
    again = BATCH * (tokens * LAYERS * (LAYER - 2 * HIDDEN * INNER) + attention(tokens, tokens))
    assert half_flops(checkpointed["backward"]) == half_flops(plain["backward"]) + again


def test_pieces_that_are_not_executed_are_counted(
    settings_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulator runs two of a micro-batch's pieces; the work is that of all."""
    few = settings_for(dtype="bfloat16", recipe="lean", per_device_train_batch_size=8, num_generations=8)
    whole = work_of(replace(few, max_tokens_per_piece=None), monkeypatch)
    pieces = work_of(replace(few, max_tokens_per_piece=PROMPT + COMPLETION), monkeypatch)
    assert half_flops(pieces["forward"]) == pytest.approx(half_flops(whole["forward"]), rel=0.01)
    assert half_flops(pieces["backward"]) == pytest.approx(half_flops(whole["backward"]), rel=0.01)


def test_tiles_that_are_repeated_are_counted(settings_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    lean = settings_for(dtype="bfloat16", recipe="lean", prompt_length=40, completion_length=160)
    whole = work_of(replace(lean, tiled_mlp=0), monkeypatch)
    tiled = work_of(replace(lean, tiled_mlp=16), monkeypatch)
    assert half_flops(tiled["forward"]) == pytest.approx(half_flops(whole["forward"]), rel=0.01)


def test_offloading_costs_the_link(settings_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    work = work_of(settings_for(dtype="bfloat16", gradient_checkpointing="offloaded"), monkeypatch)
    boundaries = LAYERS * BATCH * (PROMPT + COMPLETION) * HIDDEN * 2
    assert sum(tally.host_bytes for name, tally in work.items() if name != "estimate") == 2 * boundaries


def test_the_lean_trainers_offloading_costs_the_link_at_every_crossing(
    settings_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slabs of host memory are made once; each layer's input but the last's goes there and comes back."""
    sequence = PROMPT + COMPLETION
    lean = settings_for(
        dtype="bfloat16", recipe="lean", gradient_checkpointing="offloaded", per_device_train_batch_size=8,
        num_generations=8, max_tokens_per_piece=sequence,
    )  # fmt: skip
    work = work_of(lean, monkeypatch)
    boundaries = (LAYERS - 1) * 8 * sequence * HIDDEN * 2
    assert sum(tally.host_bytes for name, tally in work.items() if name != "estimate") == 2 * boundaries


def test_an_estimate_adds_up_and_says_what_it_rests_on(
    settings_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    estimate = work_of(settings_for(dtype="bfloat16"), monkeypatch, "RTX 4090")["estimate"]
    assert estimate["basis"] == "roofline"
    assert estimate["step_s"] == pytest.approx(sum(estimate["phases"].values()), abs=1e-5)
    assert min(estimate["phases"][p] for p in ("generate", "forward", "backward", "optimizer_step")) > 0
    assert any("165.2 TFLOP/s" in words for words in estimate["assumptions"])


def test_a_card_known_by_its_size_has_no_speed(
    settings_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert work_of(settings_for(), monkeypatch, "24GB")["estimate"] is None


def test_every_card_that_has_a_name_has_a_speed() -> None:
    for gpu in known_gpus():
        speed = speed_of(gpu.name)
        assert speed is not None
        assert speed.half >= speed.single > 0
        # Memory that would be read in under 5 ms or over 100 is a wrong figure.
        assert 0.005 < gpu.total_bytes / speed.bandwidth < 0.1


def test_bfloat16_is_slow_before_ampere() -> None:
    as_bfloat16, as_float16 = speed_of("V100-16GB"), speed_of("V100-16GB", bfloat16=False)
    assert as_bfloat16 is not None
    assert as_float16 is not None
    assert as_float16.half / as_bfloat16.half == pytest.approx(125 / 15.7)
