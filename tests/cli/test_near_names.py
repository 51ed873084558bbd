"""A misspelt command or card is answered with the name that was meant."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from memprof.cli.group import main
from memprof.config.gpus import find_gpu, size_words
from memprof.errors import UsageError


@pytest.mark.parametrize(("typed", "meant"), [("reprot", "report"), ("simluate", "simulate"), ("plann", "plan")])
def test_a_command_like_one_is_named(typed: str, meant: str) -> None:
    done = CliRunner().invoke(main, [typed, "x"])
    assert done.exit_code == 2
    assert f"Did you mean '{meant}'?" in done.output


def test_nothing_is_guessed_of_what_is_like_no_command() -> None:
    done = CliRunner().invoke(main, ["zzzz"])
    assert done.exit_code == 2
    assert "Did you mean" not in done.output


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--trainer ppo", "--trainer 'ppo': choose from grpo, rloo, sft, dpo."),
        ("--pipeline-parallel-size 2", "pipeline parallelism is not simulated; give --gpus N --sharding fsdp2"),
        ("--expert-parallel-size 2", "expert parallelism is not simulated"),
        ("--tensor-parallel-size 2", "give --gpus N --sharding tp."),
        ("--batch-size 8 --per-device-train-batch-size 4", "are the same option: give one of them"),
        ("--gradient-checkpointing --no-gradient-checkpointing", "contradict each other: give one of them"),
        ("--sharding pp --gpus 4", "--sharding 'pp': pipeline parallelism is not simulated; else choose from ddp"),
        ("--generation sglang", "SGLang runs in processes of its own, which is --generation none"),
        ("-o out.pdf", "-o out.pdf: give a name that ends in .html (page) or .pickle (snapshot)"),
        ("--trl-version 1.99", "--trl-version 1.99: the GRPO loss of this release is not simulated"),
        ("--lora_r 8 --lora-rank=16", "--lora_r and --lora-rank are the same option: give one of them"),
        ("--fp8", "weights in 8 bits are not simulated"),
        ("--optim AdamW", "did you mean adamw_torch or"),
        ("--optim ademamix_16bit", "did you mean ademamix_8bit or"),
        ("--optim galore_adamw", "'galore_adamw' is not simulated: it stores its moments in a low-rank projection"),
    ],
)
def test_what_newcomers_type_is_answered_in_one_sentence(typed: str, words: str) -> None:
    done = CliRunner().invoke(main, ["simulate", "--model", "Qwen/Qwen2.5-0.5B", "--gpu", "H100", *typed.split()])
    assert done.exit_code == 2
    assert words in done.output


def test_a_card_like_one_is_named() -> None:
    with pytest.raises(UsageError, match=r"did you mean RTX 4090 or RTX 4080\?\)\. .* memory, such as 24GB\.$"):
        find_gpu("RTX4009")
    with pytest.raises(UsageError, match=r"Known GPUs: .*T4, .*MI300X"):
        find_gpu("zzz9")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["simulate", "--gpu", "RTX4009"], "RTX 4090"),  # before the model is looked for
        (["simulate", "--gpu", "RTX4009", "--model", "nobody/has-it"], "RTX 4090"),
        (["plan", "--gpu", "RTX4009", "--model", "nobody/has-it"], "RTX 4090"),
        (["simulate", "--model", "Qwen/Qwen2.5-0.5B", "--recipe", "leen"], "lean"),
        (["simulate", "--model", "Qwen/Qwen2.5-0.5B", "--optim", "adamw_8bits"], "adamw_8bit"),
        (["plan", "--model", "Qwen/Qwen2.5-0.5B", "--gpu", "4090", "--vary", "num_gen=2,4"], "num_generations"),
    ],
)
def test_a_value_like_one_is_named(typed: list[str], said: str) -> None:
    done = CliRunner().invoke(main, typed)
    assert done.exit_code == 2
    assert f"did you mean {said}" in done.output


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("24GB", "24GB is 22.35 GiB (a GPU sold with that size, RTX 4090, has 23.52: give the model of yours)"),
        ("80G", "80G is 74.51 GiB (a GPU sold with that size, A100-80GB, has 79.15: give the model of yours)"),
        ("23GB", "23GB is 21.42 GiB"),  # an L4 has as much, and is sold as 24 GB
        ("24GiB", ""),
        ("H100", ""),
    ],
)
def test_a_size_is_explained_in_gib(typed: str, words: str) -> None:
    assert size_words(typed) == words
