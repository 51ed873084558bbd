"""A deep model derived from three shallow ones equals the executed one: each block, phase, category and peak."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from memprof.config.gpus import find_gpu
from memprof.config.settings import Settings

pytestmark = [pytest.mark.trl]

_SHAPE: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": False, "head_dim": 64,
}  # fmt: skip
LAYERS = 10
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "gemma3": {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    },
    "moe": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
LORA = {"lora_r": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, LoRA": ("llama", LORA),
    "llama, LoRA, no checkpointing": ("llama", {**LORA, "gradient_checkpointing": False}),
    "llama, full, fp32": ("llama", {"dtype": "float32"}),
    "qwen3, full, two micro-batches": ("qwen3", {"gradient_accumulation_steps": 2}),
    "qwen3, QLoRA": ("qwen3", {**LORA, "load_in_4bit": True}),
    "gemma3, LoRA": ("gemma3", LORA),
    "moe, full, no checkpointing": ("moe", {"gradient_checkpointing": False}),
    "llama, SFT": ("llama", {**LORA, "trainer": "sft"}),
    "llama, DPO, 8 bits": ("llama", {"trainer": "dpo", "optim": "adamw_8bit"}),
    "llama, full logits": ("llama", {**LORA, "recipe": "trl-full-logits"}),
    "llama, FSDP2, LoRA, generated": ("llama", {**LORA, "gpus": 8, "sharding": "fsdp2", "generation": "hf"}),
    "moe, FSDP2, full": ("moe", {"gpus": 4, "sharding": "fsdp2"}),
}
HEAVY = (
    "llama, SFT", "llama, full logits", "llama, LoRA, no checkpointing", "moe, full, no checkpointing",
    "moe, FSDP2, full",
)  # fmt: skip
_NOT_OF_THE_RUN = ("created", "overhead")


@pytest.fixture
def deep_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Derive models of a few layers, too, where that costs more than it saves."""
    from memprof.simulate.shortcuts.depth import layers

    monkeypatch.setattr(layers, "WORTH", 2.0)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Derive anew in every test."""
    from memprof.simulate.shortcuts.depth import run

    run._derived.clear()
    yield
    run._derived.clear()


def was_derived() -> bool:
    from memprof.simulate.shortcuts.depth import run

    return any(found is not None for found in run._derived.values())


def settings_of(folder: Path, kind: str, layers: int = LAYERS, **more: Any) -> Settings:
    path = folder / "config.json"
    path.write_text(json.dumps({**_SHAPE, **SHAPES[kind], "num_hidden_layers": layers}))
    given = {
        "num_generations": 4, "per_device_train_batch_size": 4, "prompt_length": 48, "completion_length": 16,
        "dtype": "bfloat16", "generation": "none",
    }  # fmt: skip
    return Settings(model=str(path), **{**given, **more})


def both(settings: Settings) -> list[dict[str, Any]]:
    """Simulate with and without the shortcut, from the same line: it stands in the stacks."""
    from memprof.simulate.run import simulate_settings
    from memprof.simulate.shortcut_switches import without

    runs = []
    for off in ((), ("depth",)):
        with without(*off):
            runs.append(simulate_settings(settings, gpu=find_gpu("H100")))
    return runs


def facts_of(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in raw["memprof"].items() if name not in _NOT_OF_THE_RUN}


def events_of(raw: dict[str, Any]) -> list[Any]:
    """Return the trace, the frees that follow one another in the order of their addresses: theirs is a hash's."""
    events: list[Any] = []
    for is_free, group in groupby(raw["device_traces"][0], key=lambda event: event["action"].startswith("free")):
        rows = list(group)
        if is_free:
            events += sorted((row["action"], row["addr"], row["size"], row["stream"]) for row in rows)
        else:
            events += rows
    return events


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.heavy] if n in HEAVY else []) for n in CASES])
def test_a_derived_run_equals_the_executed_one(name: str, tmp_path: Path, deep_enough: None) -> None:
    kind, more = CASES[name]
    found, expected = both(settings_of(tmp_path, kind, **more))
    assert was_derived()
    differing = [name for name, value in facts_of(expected).items() if facts_of(found)[name] != value]
    assert differing == []
    # Not compared by pytest, which would take minutes to describe what differs in so many events.
    has_same_events, has_same_blocks = (
        events_of(found) == events_of(expected),
        found["segments"] == expected["segments"],
    )
    assert has_same_events
    assert has_same_blocks


def test_what_does_not_follow_from_shallow_models_is_executed(tmp_path: Path, deep_enough: None) -> None:
    """A second model asks how much memory the first has left free, which is not affine in the depth."""
    found, expected = both(settings_of(tmp_path, "llama", dtype="float32", beta=0.04))
    assert not was_derived()
    assert found["memprof"]["counters"] == expected["memprof"]["counters"]


def test_layers_that_differ_only_deep_down_are_seen(tmp_path: Path) -> None:
    """The three shallow models would be alike, and another model than the deep one."""
    from memprof.simulate.shortcuts.depth.layers import depths_of
    from memprof.simulate.trainer.models import load_config

    settings = settings_of(tmp_path, "moe", layers=40)
    config = load_config(settings.model)
    known = depths_of(config)
    assert known is not None
    assert (known.shallow, known.period, known.repeats) == ((2, 3, 4), 1, 38)
    config.mlp_only_layers = [30]
    assert depths_of(config) is None
    config.mlp_only_layers = [0, 1]
    dense_first = depths_of(config)
    assert dense_first is not None
    assert dense_first.shallow == (3, 4, 5)


def test_a_device_that_is_full_is_simulated_in_full(tmp_path: Path, deep_enough: None) -> None:
    from memprof.simulate.run import simulate_settings

    settings = settings_of(tmp_path, "llama", lora_r=8)
    raw = simulate_settings(settings, capacity=40 << 20)
    assert was_derived()
    assert raw["memprof"]["oom"]["phase"] != "other"
