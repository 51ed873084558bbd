"""An option that changes nothing in the run it is given for is refused in one sentence; defaults say nothing."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from memprof.cli.simulation_options import settings_of
from memprof.cli.unused_options import refuse_unused
from memprof.config.settings import Settings
from memprof.errors import UsageError

SFT, DPO, CPU = {"trainer": "sft"}, {"trainer": "dpo"}, {"device": "cpu"}


@pytest.mark.parametrize(
    ("run", "given", "words"),
    [
        (SFT, {"num_generations": 4}, "--num-generations 4 changes nothing here: --trainer sft generates nothing."),
        (DPO, {"steps_per_generation": 2}, "--trainer dpo generates nothing"),
        (DPO, {"num_iterations": 2}, "--trainer dpo generates nothing"),
        (SFT, {"generation": "vllm"}, "--generation vllm changes nothing here"),
        (SFT, {"cache_implementation": "quantized"}, "generates nothing"),
        (SFT, {"vllm_gpu_memory_utilization": 0.4}, "generates nothing"),
        (SFT, {"beta": 0.1}, "has no KL term"),
        ({**SFT, "max_length": 64}, {"completion_length": 32}, "--max-length alone sets the length of the rows"),
        ({**SFT, "max_length": 64}, {"prompt_length": 32}, "--max-length alone sets the length of the rows"),
        ({**DPO, "max_length": 64}, {"prompt_length": 64}, "leaves no tokens for an answer"),
        ({}, {"lora_target_modules": ("q_proj", "v_proj")}, "--lora-target-modules q_proj,v_proj .*add --lora-r"),
        ({}, {"vllm_enable_sleep_mode": True}, "--vllm-enable-sleep-mode changes nothing here: .*--generation vllm"),
        ({"generation": "none"}, {"vllm_gpu_memory_utilization": 0.4}, "add --generation vllm"),
        ({"recipe": "lean", "generation": "none"}, {"generation_batch": 2}, "nothing with --generation none"),
        ({"gpus": 2}, {"reduce_bucket_size": 1000}, "buckets are ZeRO's"),
        (CPU, {"alloc_conf": "expandable_segments:True"}, "--device cpu has no CUDA allocator"),
        (CPU, {"attn": "math"}, "--device cpu has none"),
    ],
)
def test_an_option_without_effect_is_refused(run: dict[str, Any], given: dict[str, Any], words: str) -> None:
    settings = Settings(model="m", **{**given, **run})
    with pytest.raises(UsageError, match=words):
        refuse_unused(settings, given)


@pytest.mark.parametrize(
    ("run", "given"),
    [
        (SFT, {"generation": "none", "cache_implementation": "dynamic", "vllm_enable_sleep_mode": False, "beta": 0.0}),
        (SFT, {"prompt_length": 32, "completion_length": 32}),
        (DPO, {"beta": 0.1, "max_length": 64, "prompt_length": 32}),
        ({"lora_r": 8}, {"lora_target_modules": ("q_proj",)}),
        ({"generation": "vllm"}, {"vllm_gpu_memory_utilization": 0.4, "vllm_enable_sleep_mode": True}),
        ({"gpus": 2, "sharding": "zero2"}, {"reduce_bucket_size": 1000, "gpus_per_node": 2}),
        (CPU, {"attn": "auto", "alloc_conf": ""}),
        ({}, {"gpus": 1, "sharding": "ddp", "gpus_per_node": 8}),  # as in a loop over numbers of GPUs
    ],
)
def test_what_has_an_effect_or_says_a_default_is_taken(run: dict[str, Any], given: dict[str, Any]) -> None:
    refuse_unused(Settings(model="m", **{**given, **run}), given)


def test_a_plan_gives_adapters_their_modules_before_it_chooses_an_adapter() -> None:
    given = {"model": "m", "lora_target_modules": "q_proj"}
    with pytest.raises(UsageError, match="add --lora-r"):
        settings_of(None, given)
    assert settings_of(None, given, open_names=("lora_r",)).lora_target_modules == ("q_proj",)


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "--model", "Qwen/Qwen3-8B", "--trainer", "sft", "--num-generations", "4"],
        ["simulate", "--model", "Qwen/Qwen3-8B", "--device", "cpu", "--attn", "flash"],
        ["plan", "--model", "Qwen/Qwen3-8B", "--gpu", "H100", "--vllm-gpu-memory-utilization", "0.5"],
    ],
)
def test_the_commands_refuse_it_with_the_documented_code(arguments: list[str]) -> None:
    from memprof.cli import main

    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert "changes nothing here" in done.stderr
    assert done.stdout == ""


def test_an_executor_of_one_simulation_is_refused() -> None:
    from memprof.cli import main

    refused = CliRunner().invoke(main, ["simulate", "--model", "Qwen/Qwen2.5-0.5B-Instruct", "--executor", "ray"])
    assert (refused.exit_code, "add --completion-lengths" in refused.output) == (2, True)


@pytest.mark.parametrize("more", [["--completion-lengths", "30:5"], ["--memory-budget", "24GB"]])
def test_runs_of_other_processes_are_not_asked_for_without_shortcuts(more: list[str]) -> None:
    from memprof.cli import main

    done = CliRunner().invoke(main, ["simulate", "--model", "m", "--no-shortcuts", *more])
    assert done.exit_code == 2
    assert "--no-shortcuts executes one run: drop --completion-lengths and --memory-budget." in done.stderr
