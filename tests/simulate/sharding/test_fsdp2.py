"""One rank of several: what it holds is its share, and what it needs to talk to the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memprof.errors import InputError, UsageError
from memprof.vocabulary import Category
from tests.forked import found_by_two_ranks
from tests.simulate.conftest import TINY
from tests.simulate.sharding.test_zero import _sizes_of
from tests.simulate.test_closed_forms import LAYER, PARAMETERS, ROPE, H, L, V, _analysis, _requested, _sizes


def test_a_rank_holds_its_share(settings_for: Callable[..., Any]) -> None:
    world = 4
    found = _analysis(settings_for(generation="none", sharding="fsdp2", gpus=world, optim="adamw_torch_fused"))
    # Sharded in float32; at the most the head's unit (its norm with it) is gathered, in bfloat16, beside a layer.
    assert _requested(found, "weights") - 4 * PARAMETERS // world - ROPE in (
        2 * (V * H + H),  # type: ignore[operator]
        2 * (V * H + H + LAYER),  # type: ignore[operator]
    )
    assert _requested(found, "optimizer_state") == 2 * 4 * PARAMETERS // world + 4 * len(_sizes())


def test_what_is_gathered_and_reduced_is_communication(settings_for: Callable[..., Any]) -> None:
    found = _analysis(settings_for(generation="none", sharding="fsdp2", gpus=4, optim="adamw_torch_fused"))
    units = {2 * V * H, 2 * LAYER, 2 * (V * H + H)}  # type: ignore[operator]
    assert _sizes_of(found, Category.COMMUNICATION) == units
    assert set(found.timeline.stream.tolist()) == {0, 1, 2}  # the default one, for gathering, for reducing
    details = {r.detail for r in found.explain("phase:forward", category="weights", top=1000)}
    assert details == {"sharded", "unsharded", None}  # rotary buffers are neither


def test_an_adapter_is_sharded_with_its_model(settings_for: Callable[..., Any]) -> None:
    settings = settings_for(
        generation="none", sharding="fsdp2", gpus=4, optim="adamw_torch_fused", lora_r=4, dtype="bfloat16"
    )
    found = _analysis(settings)
    adapter = 4 * L * 7  # values of this rank's rows of each A and B
    assert _requested(found, "optimizer_state") >= 8 * adapter
    step = found.explain("phase:optimizer_step", category="adapters", top=1000)
    assert {r.detail for r in step} == {"sharded"}
    assert sum(r.requested_bytes for r in step) * 2 == _requested(found, "optimizer_state") - 4 * len(step)
    # Of the base model, in bfloat16, the head's unit is gathered at the most, beside a layer with its float32 adapter.
    held = _requested(found, "weights") - 2 * PARAMETERS // 4 - ROPE
    assert held in (2 * (V * H + H), 2 * (V * H + H + LAYER))  # type: ignore[operator]


@pytest.mark.trl
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "whole"), [("TRANSFORMER_BASED_WRAP", {"0": [0], "1": [1]}), ("NO_WRAP", {"0": [0, 1], "1": [0, 1]})]
)
def test_two_real_ranks_gather_an_adapted_model_by_layers(policy: str, whole: dict[str, Any], tmp_path: Path) -> None:
    """TRL's fsdp2.yaml has the first policy; without one, accelerate gathers all layers at once."""
    ranks = found_by_two_ranks("tests.simulate.sharding.adapter_two_ranks", tmp_path, policy)
    assert ranks == [whole, whole]


_MOE = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 1000, "max_position_embeddings": 256, "tie_word_embeddings": False, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.trl
@pytest.mark.slow
@pytest.mark.parametrize(
    "own",
    [
        {"model_type": "qwen3_moe", "intermediate_size": 136, "moe_intermediate_size": 40, "num_experts": 4},
        pytest.param(
            {"model_type": "mixtral", "intermediate_size": 40, "num_local_experts": 4}, marks=pytest.mark.heavy
        ),
    ],
    ids=["qwen3_moe", "mixtral"],
)
def test_two_real_ranks_gather_all_experts_of_a_layer_as_simulated(own: dict[str, Any], tmp_path: Path) -> None:
    """Two of four experts see a token; all four are gathered with their layer, of which one at a time is whole."""
    from memprof.analysis.analysis import analyze
    from memprof.config.settings import Settings
    from memprof.simulate.run import simulate_settings
    from memprof.snapshot.reader import snapshot_from_raw
    from tests.simulate.sharding.moe_two_ranks import ROWS, TOKENS

    (tmp_path / "config.json").write_text(json.dumps({**_MOE, **own}))
    ranks = found_by_two_ranks("tests.simulate.sharding.moe_two_ranks", tmp_path)
    one, other = ranks
    assert one == other
    for layer, whole in one["whole"].items():
        assert {name.partition(".")[0] for name in whole} == {layer}
        assert any("experts" in name for name in whole)
    settings = Settings(
        str(tmp_path), trainer="sft", max_length=TOKENS, per_device_train_batch_size=ROWS, optim="adamw_torch",
        dtype="bfloat16", mixed_precision="no", gpus=2, sharding="fsdp2", gradient_checkpointing=False,
    )  # fmt: skip
    found = analyze(snapshot_from_raw(simulate_settings(settings, stacks=False)))
    staged = found.timeline.requested[found.attribution.category == Category.COMMUNICATION.code].tolist()
    assert staged == one["sizes"] * 2  # two steps are simulated
    assert min(staged) > 3 * 4 * 48 * 40 * 2, "a layer's unit holds all of its experts"


@pytest.mark.parametrize("recipe", [pytest.param("trl", marks=pytest.mark.heavy), "lean"])
def test_a_sharded_adapter_generates(settings_for: Callable[..., Any], recipe: str) -> None:
    """What is left of the model is gathered for generate() too, which an adapter hands on below the root."""
    settings = settings_for(
        generation="hf", sharding="fsdp2", gpus=2, optim="adamw_torch_fused", lora_r=4, recipe=recipe, beta=0.1
    )
    found = _analysis(settings)
    assert {"generate", "reference_logprobs", "forward", "backward"} <= {phase.phase for phase in found.phases}


_FIRST_IS_THE_REFERENCE = "drop --beta, or let the model generate"


def test_a_reference_before_every_other_forward_is_refused_as_it_fails(settings_for: Callable[..., Any]) -> None:
    settings = settings_for(generation="none", sharding="fsdp2", gpus=2, optim="adamw_torch_fused", lora_r=4, beta=0.1)
    with pytest.raises(InputError, match=_FIRST_IS_THE_REFERENCE):
        _analysis(settings)


@pytest.mark.slow
@pytest.mark.trl
def test_two_ranks_with_an_adapter_fail_and_generate_as_simulated(tmp_path: Path) -> None:
    for case, words in (("generate", None), ("lean", None), ("beta", "grad_dtype")):
        (tmp_path / case).mkdir()
        for error in found_by_two_ranks("tests.simulate.sharding.grpo_two_ranks", tmp_path / case, case):
            assert (error is None) == (words is None), error
            assert words is None or words in error


def test_tensor_parallel_ranks_divide_every_matrix(settings_for: Callable[..., Any]) -> None:
    settings = settings_for(generation="none", sharding="tp", gpus=2, optim="adamw_torch_fused", beta=0.1)
    found = _analysis(settings)
    norms = (2 * L + 1) * H  # type: ignore[operator]  # whole on both
    share = (PARAMETERS - norms) // 2 + norms
    assert _requested(found, "weights") == _requested(found, "reference_model") == 4 * share + ROPE
    assert _requested(found, "optimizer_state") == 8 * share + 4 * len(_sizes())


def test_tensor_parallel_ranks_share_a_tied_head(settings_for: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "tie_word_embeddings": True}))
    run = {"generation": "none", "sharding": "tp", "gpus": 2, "optim": "adamw_torch_fused"}
    tied, apart = (_analysis(settings_for(**run, **more)) for more in ({"model": str(tmp_path)}, {}))
    head = TINY["vocab_size"] * H // 2  # type: ignore[operator]
    assert _requested(apart, "weights") - _requested(tied, "weights") == 4 * head
    assert _requested(apart, "optimizer_state") - _requested(tied, "optimizer_state") == 8 * head + 4


def test_heads_that_ranks_cannot_share_are_refused_in_one_sentence(settings_for: Callable[..., Any]) -> None:
    words = "6 query heads and 2 key and value heads cannot be divided by 4; use --gpus 2."
    with pytest.raises(UsageError, match=words):
        _analysis(settings_for(generation="none", sharding="tp", gpus=4, optim="adamw_torch_fused"))


def test_the_whole_model_is_never_on_one_rank(settings_for: Callable[..., Any]) -> None:
    found = _analysis(settings_for(generation="none", sharding="fsdp2", gpus=4, optim="adamw_torch_fused"))
    load = next(b for b in found.phases if b.phase == "load")
    assert load.allocated_bytes < 4 * PARAMETERS


def test_buckets_of_ddp_are_as_large_as_the_gradients(settings_for: Callable[..., Any]) -> None:
    found = _analysis(settings_for(generation="none", gpus=2))
    assert _requested(found, "communication") == 4 * PARAMETERS
    assert _requested(found, "weights") == 4 * PARAMETERS + ROPE
    assert len(_sizes()) == 9 * L + 3


def test_a_rank_may_hold_one_completion_of_a_group(settings_for: Callable[..., Any]) -> None:
    settings = settings_for(generation="none", gpus=4, per_device_train_batch_size=1)
    found = _analysis(settings)
    assert {b.step for b in found.phases if b.phase == "backward"} == {1, 2}
    assert found.peak.allocated_bytes < _analysis(settings_for(generation="none", gpus=4)).peak.allocated_bytes
