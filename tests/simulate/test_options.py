"""What is kept for backward, where keys and values are, who scores: each held to arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from memprof.config.settings import Settings, read_settings
from memprof.errors import InputError, UsageError
from memprof.vocabulary import Category
from tests.simulate.conftest import TINY
from tests.simulate.sharding.test_zero import _sizes_of
from tests.simulate.test_closed_forms import KV, PARAMETERS, ROPE, H, L, V, _analysis, _requested

BATCH, TOKENS = 4, 32


def _phase(found: Any, name: str) -> int:
    return int(next(p.allocated_bytes for p in found.phases if p.step == 2 and p.phase == name))


def test_selective_checkpointing_saves_attentions_outputs(settings_for: Callable[..., Any]) -> None:
    full = _analysis(settings_for(generation="none"))
    selective = _analysis(settings_for(generation="none", gradient_checkpointing="selective"))
    output = BATCH * TOKENS * H * 2  # type: ignore[operator]
    sums = BATCH * TINY["num_attention_heads"] * TOKENS * 4  # type: ignore[operator]
    random_state = 2 * 512  # two scalars, each rounded up
    assert _phase(selective, "forward") - _phase(full, "forward") == L * (output + sums + random_state)


def test_clipping_by_none_is_refused_by_its_name(settings_for: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=r"max_grad_norm None .* give 0 to clip nothing"):
        settings_for(generation="none", max_grad_norm=None)


def test_offloaded_boundaries_are_the_hosts(settings_for: Callable[..., Any]) -> None:
    full = _analysis(settings_for(generation="none"))
    offloaded = _analysis(settings_for(generation="none", gradient_checkpointing="offloaded"))
    boundary = BATCH * TOKENS * H * 4  # type: ignore[operator]
    assert _phase(full, "backward") - _phase(offloaded, "backward") == L * boundary
    host = offloaded.to_dict()["host"]
    assert host["pinned_requested_bytes"] == L * boundary
    assert host["pinned_bytes"] == L * 32768  # 24 576 bytes each


def test_a_run_that_kills_the_host_does_not_fit(settings_for: Callable[..., Any]) -> None:
    from memprof.config.gpus import find_gpu
    from memprof.simulate.evaluate import evaluate, judge
    from memprof.simulate.run import simulate_settings

    settings = settings_for(generation="none", gpus=16, per_device_train_batch_size=1, host_memory="16GiB")
    raw = simulate_settings(settings, stacks=False)
    small = judge(lambda room: raw, find_gpu("24GB")).verdict
    raw["memprof"]["config"]["host_memory"] = "64GiB"
    large = judge(lambda room: raw, find_gpu("24GB")).verdict
    assert small is not None
    assert large is not None
    assert small.host is not None
    assert small.host.needed_bytes == 8 * 3 * 2**30  # eight processes of a node
    assert (small.fits, large.fits) == (False, True)
    assert "the host needs 24.00 GiB of 16.00 GiB" in small.sentence()
    with pytest.raises(UsageError, match="requires --gpu"):
        evaluate(settings, None)


def test_fp16_holds_what_bf16_does_and_the_loss_scaler(settings_for: Callable[..., Any]) -> None:
    from memprof.config.gpus import find_gpu
    from memprof.simulate.run import simulate_settings

    half, scaled = (
        simulate_settings(settings_for(generation="none", mixed_precision=kind), gpu=find_gpu("T4"), stacks=False)
        for kind in ("bf16", "fp16")
    )
    more = scaled["memprof"]["highest"]["allocated_bytes"] - half["memprof"]["highest"]["allocated_bytes"]
    assert more == 3 * 512  # the scale, how long it has not changed, and one number of the step's
    warned = [any("no bfloat16 units" in note for note in raw["memprof"]["notes"]) for raw in (half, scaled)]
    assert warned == [True, False]


def test_adapters_of_a_4_bit_model_under_fp16_s_loss_scaler_are_said_to_fail() -> None:
    """TRL casts them to bfloat16, and CUDA's kernel that unscales gradients has none of that dtype."""
    from memprof.config.gpus import bfloat16_note, find_gpu

    asked = Settings("m", lora_r=4, load_in_4bit=True, dtype="float32")
    configs = (asked.with_(mixed_precision=kind).known for kind in ("fp16", "bf16"))
    scaled, plain = (bfloat16_note(find_gpu("A100"), config) for config in configs)
    assert "not implemented for 'BFloat16'" in str(scaled)
    assert plain is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float16"}, "fp16 over float16 weights fails in a real run too"),
        ({"gpus": 2, "sharding": "fsdp2"}, "fp16 with --sharding fsdp2 is not simulated"),
        ({"device": "cpu"}, "fp16 scales losses on GPUs only"),
    ],
)
def test_fp16_that_cannot_run_is_refused(
    settings_for: Callable[..., Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        settings_for(mixed_precision="fp16", generation="none", **changes)


def test_a_static_cache_is_as_long_as_it_will_be(settings_for: Callable[..., Any]) -> None:
    settings = settings_for(dtype="bfloat16", cache_implementation="static")
    expected = 2 * L * BATCH * KV * 2 * (settings.sequence_length - 1)
    assert _requested(_analysis(settings), "kv_cache") == expected


@pytest.mark.parametrize(("cache_dtype", "values_a_byte"), [("fp8", 1), ("int4", 2)])
def test_quantised_caches_hold_what_their_layout_says(
    settings_for: Callable[..., Any], cache_dtype: str, values_a_byte: int
) -> None:
    settings = settings_for(
        dtype="bfloat16", cache_implementation="quantized", cache_dtype=cache_dtype, completion_length=200
    )
    # In 4 bits all is quantised anew after 128 tokens; what comes then is kept as it is.
    quantised = settings.prompt_length + 128 if cache_dtype == "int4" else settings.sequence_length - 1
    values = BATCH * KV * quantised
    assert values // values_a_byte in _sizes_of(_analysis(settings), Category.KV_CACHE)


def test_a_reward_model_is_a_model_with_one_output(settings_for: Callable[..., Any], tiny: str) -> None:
    found = _analysis(settings_for(generation="none", reward_model=tiny))
    body = PARAMETERS - V * H + H  # type: ignore[operator]
    assert _requested(found, "reward_model") == 2 * body + ROPE
    scored = next(p for p in found.phases if p.step == 2 and p.phase == "reward")
    assert scored.categories["activations"] > BATCH * TOKENS * H * 2  # type: ignore[operator]


def test_a_family_that_scores_nothing_is_no_reward_model(settings_for: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "model_type": "granite"}))
    with pytest.raises(InputError, match="no granite that scores sequences: choose another --reward-model"):
        _analysis(settings_for(generation="none", reward_model=str(tmp_path)))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gradient_checkpointing": "some"}, "choose from none, auto, full, selective, offloaded"),
        ({"gradient_checkpointing": "offloaded", "device": "cpu"}, "drop --device cpu"),
        ({"cache_implementation": "paged"}, "choose from dynamic, static, quantized"),
        ({"cache_dtype": "fp8"}, "requires --cache-implementation quantized"),
        ({"cache_implementation": "quantized", "generation": "none"}, "transformers' own generation"),
        ({"cache_implementation": "static", "dtype": "float32"}, "add --dtype bfloat16"),
        ({"host_memory": "much"}, "not a size"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Settings(model="m", **values)


def test_kinds_of_checkpointing_have_one_spelling() -> None:
    assert Settings(model="m", gradient_checkpointing="none") == Settings(model="m", gradient_checkpointing=False)
    assert Settings(model="m", gradient_checkpointing="full") == Settings(model="m", gradient_checkpointing=True)
    assert Settings(model="m", gradient_checkpointing="auto") == Settings(model="m", gradient_checkpointing=True)
    assert Settings(model="m", gradient_checkpointing="selective").checkpointing == "selective"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("gradient_checkpointing: true\ngradient_checkpointing_kwargs: {offload: true}", "offloaded"),
        ("activation_checkpointing: true\nactivation_checkpointing_kwargs: {selective: true}", "selective"),
        ("gradient_checkpointing: false\ngradient_checkpointing_kwargs: {offload: true}", False),
    ],
)
def test_kinds_of_checkpointing_are_read_as_transformers_names_them(text: str, kind: Any, tmp_path: Any) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "grpo.yaml"
    file.write_text(text)
    assert read_settings(file)["gradient_checkpointing"] == kind


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ([], None),
        (["--gradient-checkpointing"], "auto"),
        (["--gradient-checkpointing", "selective"], "selective"),
        (["--no-gradient-checkpointing"], "none"),
        (["--gradient-checkpointing", "--beta", "1"], "auto"),
        (["--gradient-checkpointing", "full"], "full"),
    ],
)
def test_the_option_takes_a_kind_or_none(words: list[str], kind: str | None) -> None:
    import click

    from memprof.cli.simulation_options import run_options

    seen = {}

    @click.command()
    @run_options
    def command(**given: Any) -> None:
        seen.update(given)

    result = CliRunner().invoke(command, words)
    assert result.exit_code == 0, result.output
    assert seen["gradient_checkpointing"] == kind


@pytest.mark.parametrize("text", ["0GB", "0", "no such card"])
def test_a_card_without_memory_or_name_is_refused(text: str) -> None:
    from memprof.config.gpus import find_gpu

    with pytest.raises(UsageError, match=r"give its memory, such as 24GB|greater than zero"):
        find_gpu(text)
