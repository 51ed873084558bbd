"""What newcomers type: other names of options, models that cannot be trained, and a model without --model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from memprof.cli.group import main
from memprof.cli.simulation_options import INSTEAD, OTHER_NAMES
from memprof.config.catalogue import find_config
from memprof.config.settings import Settings
from memprof.errors import InputError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Keep the settings that a command would simulate, and simulate nothing."""
    pytest.importorskip("trl")
    found: list[Settings] = []

    class Run:
        def __init__(self, settings: Settings, gpu: str | None) -> None:
            found.append(settings.with_(gpu=gpu))
            raise InputError("asked")

    monkeypatch.setattr("memprof.cli.commands.simulate.SettingsRun", Run)
    return found


@pytest.mark.parametrize(
    ("typed", "changes"),
    [
        (["--batch-size", "16"], {"per_device_train_batch_size": 16}),
        (["--batch_size=16"], {"per_device_train_batch_size": 16}),
        (["--lora-rank", "32"], {"lora_r": 32}),
        (["--lora_r", "32"], {"lora_r": 32}),
        (["--dtype", "bf16"], {"dtype": "bfloat16"}),
        (["--torch-dtype", "torch.float16", "--lora-r", "8"], {"dtype": "float16", "lora_r": 8}),
        (["--attn-implementation", "flash_attention_2"], {"attn": "flash"}),
        (["--max-completion-length", "77"], {"completion_length": 77}),
        (["--gpu", "2x4090"], {"gpu": "4090", "gpus": 2}),
        (["--vram", "24GB"], {"gpu": "24GB"}),
        (["--peft-type", "ia3"], {"peft_type": "IA3"}),
        (["--lora-r", "8", "--use-dora", "--modules-to-save", "lm_head"], {
            "lora_r": 8, "use_dora": True, "modules_to_save": ("lm_head",),
        }),
        (["--trl-version", "1.6"], {"recipe": "trl-in-place-logits"}),
    ],
)  # fmt: skip
def test_another_name_means_the_option(asked: list[Settings], typed: list[str], changes: dict[str, Any]) -> None:
    done = CliRunner().invoke(main, ["simulate", "Qwen/Qwen3-8B", *typed])
    assert done.output == "memprof: asked\n"
    (settings,) = asked
    assert settings.model == "Qwen/Qwen3-8B"
    assert {name: getattr(settings, name) for name in changes} == changes


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--qlora", "give --load-in-4bit --lora-r 16"),
        ("--max-seq-length", "give --prompt-length and --completion-length"),
        ("--learning-rate", "it changes no memory; drop it"),
        ("--deepspeed", "give --gpus N --sharding zero2"),
        ("--torch-compile", "it is not simulated"),
        ("--top_entropy_quantile", "write top_entropy_quantile into a file, and give it with --config"),
    ],
)
def test_a_name_that_is_no_option_says_what_to_give(typed: str, words: str) -> None:
    for command in ("simulate", "plan"):
        done = CliRunner().invoke(main, [command, "Qwen/Qwen3-8B", typed, "1"])
        assert (done.exit_code, words in done.output) == (2, True), done.output


def test_no_other_name_hides_an_option() -> None:
    from memprof.cli.commands.plan import command as plan
    from memprof.cli.commands.simulate import command as simulate

    for command in (plan, simulate):
        own = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        assert not own & OTHER_NAMES.keys()
        assert {name for name in OTHER_NAMES.values() if name not in own} == set()
    assert not OTHER_NAMES.keys() & {name for name in INSTEAD if name in ("--qlora", "--lora")}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("unsloth/Qwen3-8B-GGUF", "GGUF weights, llama.cpp's format for inference. Give Qwen/Qwen3-8B with"),
        ("qwen2.5-7b-instruct-q4_k_m.gguf", "Give Qwen/Qwen2.5-7B-Instruct with --load-in-4bit"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "Give Qwen/Qwen2.5-7B-Instruct with"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Give Qwen/Qwen2.5-7B-Instruct with"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "quantized already. Give Qwen/Qwen3-8B with"),
        ("mlx-community/Qwen3-8B-4bit", "MLX weights, Apple's format. Give Qwen/Qwen3-8B with"),
        ("someone/nobody-has-this", "hf download someone/nobody-has-this config.json --local-dir nobody-has-this"),
        ("nobody", "give a hub id, or the path"),
    ],
)
def test_a_model_that_cannot_be_used_says_what_to_use(model: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        find_config(model)
    assert words in str(caught.value)


def test_a_gguf_file_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF\x03\x00")
    with pytest.raises(InputError, match="GGUF weights"):
        find_config(str(tmp_path / "model-Q4_K_M.gguf"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert find_config(str(tmp_path)) == {"model_type": "llama"}


def test_two_models_are_refused() -> None:
    done = CliRunner().invoke(main, ["plan", "a/b", "--model", "c/d", "--gpu", "24GB"])
    assert (done.exit_code, "both name a model" in done.output) == (2, True)
