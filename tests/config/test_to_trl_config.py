"""Settings written as a config of TRL's and read back are the same settings."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from memprof.config.from_trainer import from_arguments
from memprof.config.optimizers import OPTIMIZERS, optimizer
from memprof.config.settings import Settings, read_settings
from memprof.config.to_trl_config import adapter_arguments, adapter_text, as_python, as_yaml, grpo_arguments, written
from memprof.plan.methods import METHODS, Method

RUN = Settings(
    model="some/model", dtype="bfloat16", num_generations=6, per_device_train_batch_size=3,
    gradient_accumulation_steps=4, steps_per_generation=8, num_iterations=2, completion_length=384, beta=0.02,
    optim="adamw_torch", max_grad_norm=0.5, loss_type="grpo", gradient_checkpointing=False, prompt_length=77,
)  # fmt: skip


def _read(arguments: dict[str, Any], folder: Path, lora: Any = None, kind: str = "GRPOConfig") -> Settings:
    trl = pytest.importorskip("trl")
    made = getattr(trl, kind)(output_dir=str(folder), use_cpu=True, **arguments)
    if not arguments.get("use_vllm"):
        made.use_vllm = False
    notes: list[str] = []
    settings = from_arguments(made, "some/model", lora, {"prompt_length": 77}, notes)
    assert not notes
    return settings


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mixed_precision": "no", "dtype": "float32"},
        {"gradient_checkpointing": True, "steps_per_generation": 4},
        {"lora_r": 5, "lora_target_modules": ("k_proj", "q_proj")},
        {"generation": "vllm", "vllm_gpu_memory_utilization": 0.4, "vllm_enable_sleep_mode": True},
        {"generation": "none"},
        {"max_grad_norm": 0.0},
    ],
)
def test_what_is_written_is_read_back(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = RUN.with_(**changes)
    adapter = adapter_arguments(settings)
    lora = adapter[1] if adapter is not None else None
    adapter = None
    if lora is not None:
        adapter = pytest.importorskip("peft").LoraConfig(**lora, task_type="CAUSAL_LM")
    expected = settings.with_(vllm_enable_sleep_mode=settings.engine_sleeps)  # arguments have a value
    assert _read(grpo_arguments(settings), tmp_path, adapter) == expected


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "none"])
def test_every_optimizer_is_one_that_trl_takes(name: str, tmp_path: Path) -> None:
    assert _read(grpo_arguments(RUN.with_(optim=name)), tmp_path).optim == (optimizer(name).argument or name)


def test_nothing_is_said_of_an_optimizer_where_there_is_none() -> None:
    assert "optim" not in grpo_arguments(RUN.with_(optim="none"))


def test_the_attention_asked_for_is_in_the_models_arguments() -> None:
    flash = grpo_arguments(RUN.with_(attn="flash"))["model_init_kwargs"]
    assert flash == {"dtype": "bfloat16", "attn_implementation": "flash_attention_2"}
    assert grpo_arguments(RUN)["model_init_kwargs"] == {"dtype": "bfloat16"}


def test_a_quantised_cache_says_how_it_is_kept() -> None:
    settings = RUN.with_(cache_implementation="quantized", cache_dtype="int2")
    told = grpo_arguments(settings)
    assert told["generation_kwargs"] == {"cache_config": {"backend": "quanto", "nbits": 2}}
    assert "'nbits': 2" in as_python(settings)


@pytest.mark.parametrize(("mixed", "dtype", "compute"), [("bf16", "float32", "bfloat16"), ("no", "float16", "float16")])
def test_4_bit_weights_say_what_products_are_computed_in(mixed: str, dtype: str, compute: str) -> None:
    code = as_python(RUN.with_(lora_r=4, load_in_4bit=True, mixed_precision=mixed, dtype=dtype))
    assert f"bnb_4bit_compute_dtype='{compute}')" in code


def test_text_names_what_differs_from_trls_defaults_only() -> None:
    code = as_python(RUN)
    assert "loss_type='grpo'" in code
    assert "num_iterations=2" in code
    plain = RUN.with_(loss_type="dapo", num_iterations=1, max_grad_norm=1.0)
    assert not {"loss_type", "num_iterations", "max_grad_norm"} & set(as_python(plain).replace("=", " ").split())
    assert 'loss_type: "grpo"' in as_yaml(RUN)
    assert "loss_type" not in as_yaml(plain)


def test_what_is_written_as_yaml_is_read_as_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    for changes in ({"generation": "vllm"}, {"generation": "none"}, {"lora_target_modules": ("q_proj", "v_proj")}, {}):
        run = RUN.with_(lora_r=4, **changes)
        (tmp_path / "run.yaml").write_text(as_yaml(run))
        again = Settings(**{"model": run.model, **read_settings(tmp_path / "run.yaml")})
        for name in ("generation", "lora_r", "lora_target_modules", "loss_type", "num_iterations", "completion_length"):
            assert getattr(again, name) == getattr(run, name), (changes, name)


def test_no_tiles_are_told_to_the_lean_trainer_too() -> None:
    lean = RUN.with_(recipe="lean", tiled_mlp=0, prefix_sharing=True, gradient_checkpointing="selective")
    code = as_python(lean)
    assert code.startswith("from memprof.grpo import LeanGRPOConfig, LeanGRPOTrainer\n\nargs = LeanGRPOConfig(")
    assert "tiled_mlp=0" in code
    assert "checkpointing='selective'" in code
    assert "generation_batch" not in code


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"completion_length": 128}, "max_completion_length=128"),
        ({"optim": "adamw_8bit"}, 'optim="adamw_8bit"'),
        ({"per_device_train_batch_size": 2, "steps_per_generation": 4},
         "per_device_train_batch_size=2, steps_per_generation=4"),
        ({"dtype": "bfloat16"}, 'model_init_kwargs={"dtype": "bfloat16"}'),
        ({"generation": "none"}, 'use_vllm=True, vllm_mode="server"'),
        ({"cache_implementation": "quantized", "cache_dtype": "int4"},
         'cache_implementation="quantized", generation_kwargs={"cache_config": {"backend": "quanto", "nbits": 4}}'),
        ({"lora_r": 16, "beta": 0.0},
         'beta=0.0, peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")'),
        ({"padding": "none"}, ""),
    ],
)  # fmt: skip
def test_changes_are_written_as_arguments(changes: dict[str, Any], text: str) -> None:
    assert written(changes) == text


def test_an_adapter_on_some_layers_names_them() -> None:
    assert adapter_text(4, ("q_proj", "v_proj")).endswith('target_modules=["q_proj", "v_proj"])')


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_what_is_written_for_the_command_line_is_the_same_run(method: Method, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    settings = RUN.with_(**method.settings, attn="math")
    (tmp_path / "best.yaml").write_text(as_yaml(settings))
    read = read_settings(tmp_path / "best.yaml")
    assert Settings(model="some/model", prompt_length=77, **read) == settings


def test_the_command_line_of_trl_computes_with_the_adapter_and_dtype_that_were_simulated() -> None:
    """Its own dropout is 0.05, and it computes 4-bit products in the dtype of its model's arguments."""
    trl, yaml = pytest.importorskip("trl"), pytest.importorskip("yaml")
    told = yaml.safe_load(as_yaml(RUN.with_(lora_r=4, load_in_4bit=True)))
    names = {field.name for field in fields(trl.ModelConfig)}
    model = trl.ModelConfig(**{name: value for name, value in told.items() if name in names})
    assert trl.get_peft_config(model).lora_dropout == 0.0
    assert (model.dtype, model.load_in_4bit) == ("bfloat16", True)
    assert not set(told) - names - set(inspect.signature(trl.GRPOConfig).parameters)


def test_what_has_no_argument_is_a_comment() -> None:
    settings = RUN.with_(alloc_conf="expandable_segments:True", gpus=2, sharding="fsdp2", recipe="lean")
    for text in (as_python(settings), as_yaml(settings)):
        assert "# in the environment: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n" in text
        assert "# launched on 2 GPUs with fsdp2\n" in text
    assert "no lean trainer: build LeanGRPOTrainer" in as_yaml(settings)
    computed = as_yaml(RUN.with_(lora_r=4, load_in_4bit=True, dtype="float32"))
    assert "# simulated with 4-bit matmuls in bfloat16;" in computed
    assert "#" not in as_python(RUN) + as_yaml(RUN)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"lora_r": 8, "load_in_4bit": True}, {"recipe": "lean", "lora_r": 8, "gradient_checkpointing": True},
        {"peft_type": "IA3"}, {"trainer": "rloo", "recipe": "trl"}, {"lora_r": 8, "modules_to_save": ("lm_head",)},
    ],
)  # fmt: skip
def test_the_program_to_paste_is_whole(changes: dict[str, Any], tmp_path: Path) -> None:
    """Its names are all imported, and its configurations are ones that TRL and PEFT make."""
    for package in ("trl", "peft"):
        pytest.importorskip(package)
    settings = RUN.with_(**changes)
    code = as_python(settings)
    compile(code, "paste", "exec")
    assert code.endswith("trainer.train()")
    before, _, trainer = code.partition("\ntrainer = ")
    here = before.replace("bf16=True", "bf16=False, use_cpu=True").replace("'output'", repr(str(tmp_path)))
    made: dict[str, Any] = {}
    exec(here, made)
    assert type(made["args"]).__name__ == f"{'Lean' if settings.lean else ''}{settings.trainer.upper()}Config"
    assert ("peft_config" in made) is settings.has_adapter is ("peft_config=peft_config" in trainer)
    if settings.load_in_4bit:
        assert made["args"].model_init_kwargs["quantization_config"].load_in_4bit
    assert trainer.partition("(")[0] in made
