"""What was assumed: only what nobody gave, in words that are true for the trainer, TRL's defaults called that."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from memprof.config.settings import Settings
from memprof.config.trl_arguments import OF_TRL, assumed_of, assumed_words


def _assumed(**given: Any) -> list[str]:
    told = {"model": "Qwen/Qwen2.5-0.5B-Instruct", **given}
    return assumed_words(Settings(**told, assumed=assumed_of(told)).known)


def test_rows_of_a_length_that_was_given_are_not_assumed() -> None:
    assert _assumed(trainer="sft", max_length=512, dtype="bfloat16", lora_r=16) == [
        "8 rows in a micro-batch, gradient checkpointing, optim adamw_torch_fused, "
        "PyTorch's own choice of attention (TRL's defaults)"
    ]  # fmt: skip


def test_each_trainer_in_its_own_words() -> None:
    assert _assumed(trainer="dpo")[0] == "rows of 768 tokens (the data decide; TRL cuts at 1024)"
    assert "8 pairs in a micro-batch" in _assumed(trainer="dpo")[1]
    grpo, rloo = _assumed(), _assumed(trainer="rloo", beta=0.05)
    assert grpo[:2] == [
        "prompts of 512 tokens (the data decide)", "completions of 256 tokens (TRL's default is 512)"
    ]  # fmt: skip
    assert "8 completions a prompt, beta 0," in grpo[2]
    assert "8 completions a prompt (TRL's default is 2)" in rloo
    assert "generation" not in " ".join(_assumed(trainer="sft"))


def test_an_engine_sleeps_by_its_trainers_default() -> None:
    asleep = "vLLM asleep while the model trains (the lean trainer's default)"
    assert asleep in _assumed(generation="vllm", recipe="lean")
    assert "vLLM awake while the model trains" in _assumed(generation="vllm")[-1]
    assert "vLLM" not in " ".join(_assumed(generation="vllm", recipe="lean", vllm_enable_sleep_mode=False))
    assert "vLLM" not in " ".join(_assumed())


def test_nothing_is_assumed_of_what_was_given() -> None:
    told = {name: value for name, value in OF_TRL["grpo"].items() if value is not None}
    assert _assumed(prompt_length=64, lora_r=8, **{n: v for n, v in told.items() if n != "lora_r"}) == []


@pytest.mark.parametrize("trainer", ["grpo", "rloo", "sft", "dpo"])
def test_trls_defaults_are_trls(trainer: str) -> None:
    trl = pytest.importorskip("trl")
    config = getattr(trl, f"{trainer.upper()}Config")
    theirs = {field.name: field.default for field in fields(config)}
    names = {"completion_length": "max_completion_length"}
    for name, value in OF_TRL[trainer].items():
        if name == "generation":
            assert theirs["use_vllm"] is False
        elif name not in ("dtype", "lora_r", "attn"):  # the model's and PEFT's, no field of the config
            assert theirs[names.get(name, name)] == value, name
