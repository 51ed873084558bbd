"""Adapters other than plain LoRA, and every field that a configuration's own class executes, on fake tensors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memprof.config.settings import Settings
from memprof.config.trainer_fields import ADAPTER_CLASSES, TRAINER_CLASSES, Arguments, class_fields
from tests.simulate.conftest import TINY

pytestmark = [pytest.mark.trl, pytest.mark.slow]

ADAPTERS: list[dict[str, Any]] = [
    {"lora_r": 4, "lora_target_modules": ("q_proj", "v_proj"), "use_dora": True},
    {"lora_r": 4, "modules_to_save": ("lm_head",)},
    {"peft_type": "ia3"},
    {"peft_type": "prompt_tuning", "num_virtual_tokens": 8},
]


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> str:
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    folder = tmp_path_factory.mktemp("tiny-moe")
    (folder / "config.json").write_text(json.dumps({**TINY, **experts, "output_router_logits": True}))
    return str(folder)


def _trainable_bytes(settings: Settings) -> int:
    """Count what PEFT itself makes trainable of the real model."""
    import peft
    from transformers import AutoModelForCausalLM

    from memprof.simulate.trainer.build import adapter_of
    from memprof.simulate.trainer.models import load_config

    model = peft.get_peft_model(AutoModelForCausalLM.from_config(load_config(settings.model)), adapter_of(settings))
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=["dora", "modules_to_save", "ia3", "prompt_tuning"])
def test_an_adapter_holds_what_peft_makes_trainable(settings_for: Any, adapter: dict[str, Any]) -> None:
    from memprof.analysis.analysis import analyze
    from memprof.simulate.run import simulate_settings
    from memprof.snapshot.reader import snapshot_from_raw

    settings = settings_for(dtype="float32", optim="adamw_torch", **adapter)
    report = analyze(snapshot_from_raw(simulate_settings(settings, stacks=False))).to_dict()
    requested = report["peak"]["categories_requested"]
    trainable = _trainable_bytes(settings)
    assert requested["adapters"] == trainable
    assert trainable * 2 <= report["own_peaks"]["optimizer_state"] <= trainable * 2 + 512 * 2 * 100


EXECUTED = [
    (trainer, "trainer_options", name)
    for trainer, kind in TRAINER_CLASSES.items()
    for name in class_fields()[kind].executed
] + [
    (kind, "adapter_options", name)
    for kind in ("LORA", "IA3")
    for name in class_fields()[ADAPTER_CLASSES[kind]].executed
]


@pytest.mark.heavy
@pytest.mark.parametrize(("kind", "options", "name"), EXECUTED, ids=[f"{kind}-{name}" for kind, _, name in EXECUTED])
def test_a_field_that_is_executed_runs(settings_for: Any, tiny_moe: str, kind: str, options: str, name: str) -> None:
    from memprof.simulate.run import simulate_settings

    classes = {**TRAINER_CLASSES, **ADAPTER_CLASSES}
    _, example = class_fields()[classes[kind]].executed[name]
    changes: dict[str, Any] = {options: Arguments.of({name: example})}
    if name in ("router_aux_loss_coef", "target_parameters"):
        changes |= {"model": tiny_moe, "dtype": "bfloat16"}
    if kind in TRAINER_CLASSES:
        changes |= {"trainer": kind, "beta": 0.04 if kind in ("grpo", "rloo") else 0.0}
        changes |= {"max_length": 64, "generation": "none"} if kind in ("sft", "dpo") else {}
    elif kind == "IA3":
        targets = ("k_proj", "v_proj", "down_proj")
        told = Arguments.of({"feedforward_modules": ["down_proj"], name: example})
        changes |= {"peft_type": "IA3", "lora_target_modules": targets, options: told}
    else:
        # The experts of the mixture are no modules of their own.
        targets = ("q_proj",) if changes.get("model") == tiny_moe else ("q_proj", "up_proj")
        changes |= {"lora_r": 4, "lora_target_modules": targets}
        if name == "layers_pattern":
            changes[options] = Arguments.of({"layers_to_transform": [0], name: example})
    raw = simulate_settings(settings_for(**changes), stacks=False)
    assert len(raw["device_traces"][0]) > 1000
