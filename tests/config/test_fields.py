"""Every field of the configurations that a run is written in is in the table, and none is dropped in silence."""

from __future__ import annotations

import inspect
import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from memprof.cli.group import main
from memprof.config.expected_error import expected_error
from memprof.config.fits import margin_of
from memprof.config.from_recording import settings_like
from memprof.config.settings import Settings, read_settings
from memprof.config.trainer_fields import (
    ADAPTER_CLASSES,
    TRAINER_CLASSES,
    class_fields,
    class_with,
    left_out_of,
    unsimulated_of,
)
from memprof.errors import InputError, UsageError

CLASSES = [*TRAINER_CLASSES.values(), "TrainingArguments", "ModelConfig", "ScriptArguments", *ADAPTER_CLASSES.values()]


def _installed(name: str) -> dict[str, Any]:
    """Return the fields of an installed class and their defaults; a trainer's without those of TrainingArguments."""
    transformers, trl, peft = (pytest.importorskip(package) for package in ("transformers", "trl", "peft"))
    if name == "BitsAndBytesConfig":
        signature = inspect.signature(transformers.BitsAndBytesConfig.__init__).parameters
        return {of.name: of.default for of in signature.values() if of.name not in ("self", "kwargs")}
    kind = next(getattr(package, name) for package in (transformers, trl, peft) if hasattr(package, name))
    common = {of.name for of in fields(transformers.TrainingArguments)} if name in TRAINER_CLASSES.values() else set()
    made = {of.name: of.default if of.default_factory is MISSING else of.default_factory() for of in fields(kind)}
    return {of: default for of, default in made.items() if of not in common}


@pytest.mark.parametrize("name", [*CLASSES, "BitsAndBytesConfig"])
def test_every_field_of_the_installed_releases_is_in_the_table(name: str) -> None:
    table, theirs = class_fields()[name], _installed(name)
    unknown = sorted(field for field in theirs if field not in table)
    assert not unknown, f"{name} has new fields: say in trainer_fields.toml what memprof does with them: {unknown}"


@pytest.mark.parametrize("name", class_fields())
def test_a_field_has_one_treatment(name: str) -> None:
    of = class_fields()[name]
    kinds = [of.simulated, of.no_memory, of.earlier, frozenset(of.executed), frozenset(of.not_simulated)]
    assert sum(map(len, kinds)) == len(frozenset().union(*kinds))
    for row in of.not_simulated.values():
        assert -0.91 < row.low <= row.high, row.name
        assert not row.why.endswith("."), row.name


@pytest.mark.parametrize("name", [*CLASSES, "BitsAndBytesConfig"])
def test_no_default_is_left_out(name: str) -> None:
    """A config written with all its fields, as TRL writes one, is simulated."""
    theirs = {of: default for of, default in _installed(name).items() if default is not MISSING}
    trainer = next((trainer for trainer, of in TRAINER_CLASSES.items() if of == name), "grpo")
    kind = next((kind for kind, of in ADAPTER_CLASSES.items() if of == name), "LORA")
    wrong = left_out_of(theirs, trainer, kind)
    assert [of for of in wrong if of != "runtime_config"] == []


def test_what_memprof_simulates_has_a_setting() -> None:
    """Every simulated field is a setting by its own or another name, or is read where another one is."""
    from memprof.config.settings import ALIASES

    settings = {of.name for of in fields(Settings)}
    elsewhere = {
        "activation_checkpointing_kwargs", "attn_implementation", "bf16", "fp16", "cache_config",
        "generation_batch_size",
        "generation_kwargs", "gradient_checkpointing_kwargs", "model_init_kwargs", "use_peft", "use_vllm", "vllm_mode",
        "target_parameters", "use_rslora", "torch_dtype",
    }  # fmt: skip
    for of in class_fields().values():
        assert {ALIASES.get(name, name) for name in of.simulated} - settings <= elsewhere, of.name


NOT_SIMULATED = [
    ({"fsdp": "full_shard auto_wrap"}, "fsdp"),
    ({"deepspeed": "zero3.json"}, "deepspeed"),
    ({"num_labels": 1}, "num_labels"),
    ({"lora_task_type": "SEQ_CLS"}, "lora_task_type"),
    ({"lora_r": 8, "use_qalora": True}, "use_qalora"),
    ({"lora_r": 8, "layer_replication": [[0, 4], [2, 5]]}, "layer_replication"),
    ({"torch_compile": True}, "torch_compile"),
    ({"load_in_8bit": True}, "load_in_8bit"),
    ({"generation_kwargs": {"num_beams": 4}}, "generation_kwargs.num_beams"),
    ({"model_init_kwargs": {"quantization_config": {"load_in_4bit": True}}}, "model_init_kwargs.quantization_config"),
]


@pytest.mark.parametrize(("given", "name"), NOT_SIMULATED)
def test_a_field_that_is_not_simulated_is_an_error(tmp_path: Path, given: dict[str, Any], name: str) -> None:
    pytest.importorskip("trl")
    file = tmp_path / "grpo.json"
    file.write_text(json.dumps({"model": "Qwen/Qwen2.5-0.5B", **given}))
    for command in (["simulate"], ["plan", "--gpu", "24GB"]):
        done = CliRunner().invoke(main, [*command, "--config", str(file)])
        assert (done.exit_code, f"{name} is not simulated: it" in done.output) == (2, True), done.output
        assert "--allow-unsimulated" in done.output


@pytest.mark.parametrize(("given", "name"), NOT_SIMULATED)
def test_what_is_left_out_widens_the_range_and_the_margin(tmp_path: Path, given: dict[str, Any], name: str) -> None:
    (tmp_path / "grpo.json").write_text(json.dumps({"model": "Qwen/Qwen2.5-0.5B", **given}))
    read = read_settings(tmp_path / "grpo.json")
    assert read["left_out"] == (name,)
    settings = Settings(**read)
    plain = settings.with_(left_out=())
    wide, narrow = expected_error(settings.known), expected_error(plain.known)
    assert wide.not_simulated == (name,)
    assert f"Not simulated: {name}" in wide.sentence
    for one, other in ((wide.allocated, narrow.allocated), (wide.reserved, narrow.reserved)):
        assert one.high - one.low > other.high - other.low
    assert margin_of(settings.known) > margin_of(plain.known)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": "auto"}, "DeepSpeed, .* --sharding zero3 "),
        ({"train_micro_batch_size_per_gpu": "auto"}, "DeepSpeed, .* --gpus N --sharding zero2 "),
        ({"distributed_type": "FSDP", "num_processes": 8}, "accelerate, .* --gpus 8 --sharding fsdp2 "),
        ({"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU"}, "accelerate, .* --sharding ddp "),
    ],
)
def test_a_launchers_configuration_is_answered_with_options(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"model": "Qwen/Qwen2.5-0.5B", **given}))
    with pytest.raises(InputError, match=words):
        read_settings(tmp_path / "a.json")


def test_what_trls_command_line_launches_is_read(tmp_path: Path) -> None:
    def read(**given: Any) -> dict[str, Any]:
        (tmp_path / "a.json").write_text(json.dumps({"model": "m", **given}))
        return read_settings(tmp_path / "a.json")

    assert read(accelerate_config="zero2", num_processes=4) == {"model": "m", "sharding": "zero2", "gpus": 4}
    assert read(accelerate_config="multi_gpu", num_processes=2) == {"model": "m", "sharding": "ddp", "gpus": 2}
    with pytest.raises(UsageError, match="accelerate_config fsdp1 is not read: give --gpus N --sharding"):
        read(accelerate_config="fsdp1")


def test_settings_in_memprofs_words_simulate_a_field() -> None:
    for sharding, name in (("fsdp2", "fsdp"), ("zero2", "deepspeed")):
        settings = Settings(model="m", gpus=8, sharding=sharding, optim="adamw_torch", left_out=(name,))
        assert unsimulated_of(settings.known) == []
        assert [of.name for of in unsimulated_of(settings.with_(gpus=1, sharding="ddp").known)] == [name]


def test_what_lies_outside_the_training_step_is_only_noted(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"model": "m", "eval_strategy": "steps", "per_device_eval_batch_size": 64}')
    settings = Settings(**read_settings(tmp_path / "a.json"))
    (field,) = unsimulated_of(settings.known)
    assert (field.name, field.noted) == ("eval_strategy", True)
    assert margin_of(settings.known) == margin_of(settings.with_(left_out=()).known)


def test_fields_that_are_executed_reach_their_own_class(tmp_path: Path) -> None:
    given = {
        "model": "m", "lora_r": 8, "lora_modules_to_save": ["lm_head"], "use_dora": True, "bias": "all",
        "cast_lm_head_to_fp32": True, "top_entropy_quantile": 1.0, "use_rslora": True,
    }  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(given))
    settings = Settings(**read_settings(tmp_path / "a.json"))
    assert (settings.modules_to_save, settings.use_dora, settings.left_out) == (("lm_head",), True, ())
    assert settings.adapter_options.to_dict() == {"bias": "all", "use_rslora": True}
    assert settings.trainer_options.to_dict() == {"cast_lm_head_to_fp32": True}  # the other is at its default
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


def test_a_field_of_no_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"model": "m", "my_path": "x", "model_init_kwargs": {"speedy": true}}')
    assert read_settings(tmp_path / "a.json")["unknown"] == ("my_path", "model_init_kwargs.speedy")
    (tmp_path / "a.json").write_text('{"model": "m", "modules_to_saves": ["lm_head"]}')
    with pytest.raises(InputError, match="modules_to_saves is no setting; modules_to_save is"):
        read_settings(tmp_path / "a.json")


def test_a_generation_batch_is_a_number_of_steps(tmp_path: Path) -> None:
    from memprof.cli.simulation_options import given_settings

    file = tmp_path / "a.json"
    file.write_text('{"model": "m", "per_device_train_batch_size": 4, "generation_batch_size": 64}')
    assert given_settings(file, {"gpus": 2})["steps_per_generation"] == 8
    file.write_text('{"model": "m", "per_device_train_batch_size": 4, "generation_batch_size": 6}')
    with pytest.raises(UsageError, match="not a multiple"):
        given_settings(file, {})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"use_dora": True}, "add --lora-r"),
        ({"modules_to_save": ("lm_head",)}, "add --lora-r"),
        ({"peft_type": "ia3", "lora_r": 8}, "rank of LoRA"),
        ({"peft_type": "prompt_tuning"}, "--num-virtual-tokens"),
        ({"num_virtual_tokens": 8}, "--peft-type prompt_tuning"),
        ({"peft_type": "vera"}, "choose from LORA, IA3, PROMPT_TUNING"),
        ({"peft_type": "ia3", "load_in_4bit": True}, "is not simulated"),
        ({"peft_type": "ia3", "gpus": 2, "sharding": "fsdp2", "optim": "adamw_torch"}, "is not simulated"),
    ],
)
def test_adapters_that_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Settings(model="m", **given)


def _recorded(adapter: dict[str, Any] | None, **config: Any) -> Settings:
    base = {"trainer": "GRPOTrainer", "num_generations": 8, "model_name": "Qwen/Qwen2.5-0.5B", **config}
    source = {"kind": "cuda", "config": base, "setup": {"adapter": adapter} if adapter else {}}
    return settings_like(source).settings


def test_a_recording_keeps_what_memory_follows() -> None:
    dora = {"peft_type": "LORA", "r": 8, "use_dora": True, "modules_to_save": ["lm_head"], "options": {"bias": "all"}}
    found = _recorded(dora)
    assert (found.use_dora, found.modules_to_save, found.adapter_options.to_dict()) == (
        True,
        ("lm_head",),
        {"bias": "all"},
    )
    prompt = _recorded({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 20})
    assert (prompt.peft_type, prompt.num_virtual_tokens, prompt.has_adapter) == ("PROMPT_TUNING", 20, True)
    with pytest.raises(InputError, match="adapters of the kind VERA are not simulated"):
        _recorded({"peft_type": "VERA", "r": 256})
    compiled = _recorded(None, torch_compile=True, cast_lm_head_to_fp32=True)
    assert compiled.left_out == ("torch_compile",)
    assert compiled.trainer_options.to_dict() == {"cast_lm_head_to_fp32": True}


def test_no_field_is_of_two_meanings() -> None:
    assert class_with("loss_type", "sft") is class_fields()["SFTConfig"]
    assert class_with("loss_type", "grpo") is class_fields()["GRPOConfig"]
    assert class_with("nobody_has_this") is None


@pytest.mark.parametrize(
    ("release", "recipe"),
    [
        ("1.16.0", "trl"), ("1.14", "trl"), ("1.13.0", "trl-full-logits"), ("1.10", "trl-full-logits"),
        ("1.9.2", "trl-in-place-logits"), ("1.0.0", "trl-in-place-logits"), ("0.29.1", "trl-full-logits"),
        ("0.16", "trl-full-logits"), ("0.14.0", "trl-0.14"), ("v1.6.0.dev0", "trl-in-place-logits"),
    ],
)  # fmt: skip
def test_a_release_of_trl_chooses_its_loss(release: str, recipe: str) -> None:
    settings = Settings(model="m", trl_version=release)
    assert settings.recipe == recipe
    assert settings.with_(beta=0.1).recipe == recipe
    assert settings.with_(recipe="lean").recipe == "lean"
    source = {"kind": "cuda", "versions": {"trl": release}}
    config = {"trainer": "GRPOTrainer", "num_generations": 8, "model_name": "Qwen/Qwen2.5-0.5B"}
    assert settings_like({**source, "config": config}).settings.recipe == recipe


@pytest.mark.parametrize(
    "given",
    [
        {"trl_version": "0.15.2"}, {"trl_version": "0.12"}, {"trl_version": "new"},
        {"trl_version": "0.19", "trainer": "rloo", "beta": 0.05}, {"trl_version": "1.6", "trainer": "sft"},
        {"trl_version": "1.6", "recipe": "trl-full-logits"},
    ],
)  # fmt: skip
def test_a_release_whose_loss_is_not_simulated(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--trl-version"):
        Settings(model="m", **given)
