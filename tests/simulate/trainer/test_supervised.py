"""SFT and DPO: what they hold, what they refuse, what they say is not simulated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from memprof.config.settings import Settings, read_settings
from memprof.errors import UsageError
from memprof.vocabulary import Category
from tests.simulate.test_closed_forms import LORA, PARAMETERS, ROPE, R, V, _analysis, _requested

pytestmark = pytest.mark.trl


def test_dpo_holds_a_reference_and_twice_the_rows(settings_for: Callable[..., Any]) -> None:
    sft, dpo = (_analysis(settings_for(trainer=name, max_length=32, dtype="bfloat16")) for name in ("sft", "dpo"))
    assert _requested(dpo, "weights") == _requested(dpo, "reference_model") == 2 * PARAMETERS + ROPE
    assert _requested(sft, "reference_model") == 0
    held = [found.own_peaks["activations"] for found in (sft, dpo)]
    assert held[1] > 1.8 * held[0]  # chosen and rejected rows
    assert not any("generat" in entry["action"] for entry in dpo.to_dict()["advice"])


def test_an_adapter_is_its_own_reference(settings_for: Callable[..., Any]) -> None:
    found = _analysis(settings_for(trainer="dpo", max_length=32, dtype="bfloat16", lora_r=R))
    assert _requested(found, "reference_model") == 0
    assert _requested(found, "optimizer_state") == 8 * LORA


def test_an_adapters_dropout_keeps_a_mask_of_a_byte(settings_for: Callable[..., Any]) -> None:
    from memprof.simulate.run import simulate_settings
    from tests.simulate.conftest import TINY

    settings = settings_for(trainer="sft", max_length=32, dtype="bfloat16", lora_r=R, gradient_checkpointing=False)
    made = [
        event["size"]
        for event in simulate_settings(settings.with_(lora_dropout=0.05), stacks=False)["device_traces"][0]
        if event["action"] == "alloc" and "op=aten.native_dropout.default" in event["user_metadata"]
    ]
    tokens = settings.per_device_train_batch_size * 32
    inputs = [*[TINY["hidden_size"]] * 6, TINY["intermediate_size"]]  # q, k, v, o, gate, up; down
    # Of two layers and two steps: the float32 input as it is dropped, and the mask.
    assert made == [size for width in inputs * 4 for size in (4 * tokens * width, tokens * width)]


def test_logits_in_full_are_held_with_their_copies(settings_for: Callable[..., Any]) -> None:
    settings = settings_for(trainer="sft", max_length=32, dtype="bfloat16", mixed_precision="no", lora_r=R)
    found = _analysis(settings.with_(recipe="trl-full-logits"))
    elements = settings.per_device_train_batch_size * 32 * V
    held = found.attribution.category == Category.LOSS_LOGITS.code
    assert {2 * elements, 4 * elements} <= set(found.timeline.requested[held].tolist())
    assert found.own_peaks["loss_logits"] >= 8 * elements


def test_rows_are_as_long_as_they_are_said_to_be() -> None:
    settings = Settings("m", trainer="sft", max_length=100)
    assert (settings.sequence_length, settings.with_(max_length=300).sequence_length) == (100, 300)
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_length": 9}, "of --trainer sft and dpo"),
        ({"trainer": "sft", "max_length": 1}, "at least 2"),
        ({"trainer": "sft", "recipe": "lean"}, "drop --recipe"),
        ({"trainer": "dpo", "recipe": "trl-full-logits"}, "sft also supports trl-full-logits"),
        ({"trainer": "dpo", "gpus": 2, "sharding": "zero2"}, "with ddp and with fsdp2"),
        ({"trainer": "ppo"}, "choose from grpo, rloo, sft, dpo"),
        ({"trainer": "rloo", "recipe": "liger"}, "a loss of GRPO's"),
        ({"trainer": "rloo", "max_length": 9}, "of --trainer sft and dpo"),
    ],
)
def test_contradictions_are_sentences(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Settings("m", **changes)


def test_a_file_that_compiles_is_told_so(settings_for: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "sft.json"
    file.write_text(json.dumps({"trainer": "sft", "max_length": 32, "torch_compile": True, "packing": False}))
    found = _analysis(settings_for(**read_settings(file)))
    notes = found.to_dict()["notes"]
    assert any("torch_compile is not simulated" in note for note in notes)
    assert not any("packing" in note for note in notes)


def test_the_command_takes_a_trainer(tiny: str) -> None:
    from memprof.cli import main

    options = ["--trainer", "sft", "--max-length", "32", "--dtype", "bfloat16", "--json", "-"]
    done = CliRunner().invoke(main, ["simulate", "--model", tiny, *options])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert {phase["phase"] for phase in report["phases"]} >= {"forward", "backward", "optimizer_step"}
    assert CliRunner().invoke(main, ["plan", "--model", tiny, "--gpu", "24GB", "--trainer", "sft"]).exit_code == 2
    assert CliRunner().invoke(main, ["simulate", "--model", tiny, *options, "--completion-lengths", "9"]).exit_code == 2
