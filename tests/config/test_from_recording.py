"""From a recording to the settings that would simulate it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memprof.config.catalogue import find_config
from memprof.config.from_recording import place_model, ran_on, settings_like
from memprof.config.settings import Settings
from memprof.errors import InputError

MODEL = {"model_type": "llama", "hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 100, "num_attention_heads": 6}


def _source(**changes: Any) -> dict[str, Any]:
    config = {
        "trainer": "GRPOTrainer", "model_name": "mine", "num_generations": 4, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "steps_per_generation": 4, "beta": 0.1, "optim": "adamw_torch_fused",
        "gradient_checkpointing": False, "mixed_precision": "bf16", "max_completion_length": 64, "dtype": "float32",
    }  # fmt: skip
    setup = {"model_config": MODEL, "dtypes": {"bfloat16": 1000, "float32": 10}}
    source: dict[str, Any] = {"kind": "cuda", "world_size": 1, "config": config, "setup": setup}
    for name, value in changes.items():
        (source if name in source or name == "alloc_conf" else config)[name] = value
    return source


def _supervised(trainer: str, **changes: Any) -> dict[str, Any]:
    config = {
        "trainer": trainer, "model_name": "mine", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "optim": "adamw_torch_fused", "gradient_checkpointing": False, "mixed_precision": "bf16", "dtype": "bfloat16",
    }  # fmt: skip
    source: dict[str, Any] = {"kind": "cuda", "world_size": 1, "config": config, "setup": {"model_config": MODEL}}
    for name, value in changes.items():
        (source["setup"] if name in ("batches", "completion_share") else source if name in source else config)[name] = (
            value
        )
    return source


def test_rows_that_were_seen_are_simulated() -> None:
    seen = {"batches": [[1, 4, 30, 0], [2, 4, 50, 0], [3, 2, 60, 0]]}
    sft = settings_like(_supervised("SFTTrainer", max_length=1024, packing=True, **seen))
    s = sft.settings
    assert (s.trainer, s.per_device_train_batch_size, s.sequence_length, s.padding) == ("sft", 4, 50, "worst")
    assert (s.left_out, sft.assumed) == (("packing",), ())
    dpo = settings_like(_supervised("Mine", trainer_kind="dpo", beta=0.2, completion_share=0.2, **seen))
    s = dpo.settings
    assert (s.trainer, s.per_device_train_batch_size, s.beta) == ("dpo", 2, 0.2)
    assert (s.prompt_length, s.completion_length) == (40, 10)
    assert dpo.assumed == ()
    assert settings_like(_supervised("SFTTrainer", batches=[[1, 1, 30, 0], [2, 1, 50, 0]])).settings.padding == "none"


def test_rows_that_were_not_seen_have_the_limit_and_a_note() -> None:
    found = settings_like(_supervised("DPOTrainer", max_length=64, precompute_ref_log_probs=True))
    assert (found.settings.prompt_length, found.settings.completion_length) == (32, 32)
    assert len(found.assumed) == 3
    assert "max_length, 64" in found.assumed[0]


def test_what_was_configured_is_what_is_simulated() -> None:
    likeness = settings_like(_source(alloc_conf="max_split_size_mb:64"))
    s = likeness.settings
    assert (s.num_generations, s.per_device_train_batch_size, s.gradient_accumulation_steps) == (4, 4, 2)
    assert (s.generation_steps, s.beta, s.optim, s.device) == (4, 0.1, "adamw_torch_fused", "cuda")
    assert s.dtype == "bfloat16"  # what most parameters were, whatever the first one was
    assert s.checkpointing == "none"
    assert s.alloc_conf == "max_split_size_mb:64"
    assert likeness.model == MODEL
    assert (likeness.settings.prompt_length, likeness.settings.assumed) == (512, ("prompt_length",))


@pytest.mark.parametrize("told", [{"trainer": "RLOOTrainer"}, {"trainer": "Mine", "trainer_kind": "rloo"}])
def test_rloo_is_told_from_grpo(told: dict[str, Any]) -> None:
    s = settings_like(_source(**told)).settings
    assert (s.trainer, s.recipe, s.beta) == ("rloo", "trl", 0.1)
    lean = settings_like(_source(**told, recipe="lean")).settings
    assert (lean.trainer, lean.recipe) == ("rloo", "lean")
    assert settings_like(_source()).settings.trainer == "grpo"
    simulated = {**s.to_dict(), **told, "model": "meta-llama/Llama-3.2-1B-Instruct"}  # by a script
    assert settings_like({"kind": "simulated", "config": simulated}).settings.trainer == "rloo"


def test_the_largest_batch_that_was_seen_is_simulated() -> None:
    setup = {
        "model_config": MODEL,
        "batches": [[1, 4, 30, 64], [2, 4, 50, 60], [3, 2, 60, 64]],
        "lengths": [[1, 30, 64], [2, 50, 20]],
    }
    s = settings_like(_source(setup=setup)).settings
    assert (s.prompt_length, s.completion_length, s.padding) == (50, 60, "worst")
    setup["lengths"] = [[1, 50, 60], [2, 50, 60]]
    assert settings_like(_source(setup=setup)).settings.padding == "none"


def test_adapters_are_on_the_modules_they_were_on() -> None:
    adapter = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["k_proj", "q_proj"]}
    s = settings_like(_source(setup={"model_config": MODEL, "adapter": adapter, "load_in_4bit": True})).settings
    assert (s.lora_r, s.lora_target_modules, s.load_in_4bit) == (8, ("k_proj", "q_proj"), True)


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4}, "generation", "vllm"),
        ({"use_vllm": True, "vllm_mode": "server"}, "generation", "none"),
        ({"attn_implementation": "eager"}, "attn", "math"),
        ({"optim": "paged_ademamix_8bit"}, "optim", "paged_adamw_8bit"),
        ({"world_size": 8, "distributed_type": "FSDP"}, "sharding", "fsdp2"),
        ({"world_size": 2, "distributed_type": "MULTI_GPU"}, "gpus", 2),
        ({"kind": "trace"}, "device", "cpu"),
    ],
)
def test_each_setting_is_translated(changes: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(settings_like(_source(**changes)).settings, name) == value


def test_the_lean_trainers_settings_are_its_own() -> None:
    lean = {"trainer": "Mine", "recipe": "lean", "gradient_checkpointing": True}
    s = settings_like(_source(**lean, max_tokens_per_piece=512, prefix_sharing=True)).settings
    assert (s.recipe, s.checkpointing, s.max_tokens_per_piece, s.prefix_sharing) == ("lean", "auto", 512, True)
    s = settings_like(_source(**lean, checkpointing="selective", tiled_mlp=0, generation_batch=3)).settings
    assert (s.checkpointing, s.tiled_mlp, s.generation_batch) == ("selective", 0, 3)
    off = settings_like(_source(**{**lean, "gradient_checkpointing": False})).settings
    assert off.checkpointing == "none"
    rough = settings_like(_source(**lean, checkpointing="mlp", cache_implementation="offloaded"))
    assert (rough.settings.checkpointing, rough.settings.cache_implementation) == ("none", "dynamic")
    assert sum("uses more memory" in words for words in rough.assumed) == 2
    older = settings_like(_source(trainer="LeanGRPOTrainer"))
    assert older.settings.recipe == "lean"
    assert any("defaults are assumed" in words for words in older.assumed)
    with pytest.raises(InputError, match="choose from"):
        settings_like(_source(**lean, checkpointing="some"))


def test_the_card_that_ran_is_known_where_it_matters() -> None:
    source = {**_source(recipe="lean"), "device_total_bytes": 24 * 2**30}
    lean = settings_like(source).settings
    assert ran_on(source, lean) == f"{24 * 2**30}B"
    assert ran_on(source, lean.with_(generation="vllm")) == f"{24 * 2**30}B"
    for known in (lean.with_(generation_batch=2), lean.with_(device="cpu"), lean.with_(recipe="trl")):
        assert ran_on(source, known) is None
    assert ran_on({**source, "device_total_bytes": None}, lean) is None


def test_a_simulation_is_like_itself() -> None:
    settings = Settings(model="Qwen/Qwen3-8B", lora_r=4, lora_target_modules=("q_proj",), num_generations=2)
    source = {"kind": "simulated", "config": {**settings.to_dict(), "hidden_size": 1}, "setup": None}
    likeness = settings_like(source)
    assert likeness.settings == settings
    assert likeness.model == find_config("Qwen/Qwen3-8B")


def test_what_cannot_be_simulated_is_said() -> None:
    for source, words in (
        ({"kind": "cuda", "config": None}, "nothing is known of this run's configuration"),
        (_source(setup={}), "lacks its model's config"),
        ({"kind": "cuda", "config": {"trainer": "KTOTrainer"}, "setup": {"model_config": MODEL}}, "none of GRPO, RLOO"),
        (_supervised("SFTTrainer"), "neither the lengths of rows"),
        (_supervised("SFTTrainer", max_length=64, distributed_type="DEEPSPEED", world_size=2), "with ddp and with"),
        (_source(num_generations=3), "cannot be simulated: the generation batch"),
        (_source(num_generations="many"), "cannot be simulated"),
    ):
        with pytest.raises(InputError, match=words):
            settings_like(source)


def test_recorded_sizes_stand_in_for_a_config() -> None:
    sizes = {
        "model_type": "llama",
        "hidden_size": 48,
        "layers": 2,
        "attention_heads": 6,
        "kv_heads": 2,
        "vocab_size": 9,
    }
    model = settings_like(_source(setup={}, **sizes)).model
    assert model["num_hidden_layers"] == 2
    assert model["num_key_value_heads"] == 2


def test_a_model_is_placed_by_what_is_in_it(tmp_path: Path) -> None:
    likeness = settings_like(_source(model_name="/home/somebody/models/My Model/"))
    first, again = place_model(likeness, tmp_path), place_model(likeness, tmp_path)
    assert first == again
    folder = Path(first.model)
    assert folder.name == "My-Model"
    assert json.loads((folder / "config.json").read_text()) == MODEL
    assert find_config(first.model) == MODEL
    assert [p.name for p in folder.iterdir()] == ["config.json"]


def test_a_model_of_the_catalogue_keeps_its_name(tmp_path: Path) -> None:
    source = {"kind": "simulated", "config": Settings(model="Qwen/Qwen3-8B").to_dict()}
    assert place_model(settings_like(source), tmp_path).model == "Qwen/Qwen3-8B"
    assert not list(tmp_path.iterdir())
