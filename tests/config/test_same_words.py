"""The same words give the same settings: ``simulate``, ``plan``, ``advise`` and ``--like``, beside TRL's own config."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from benchmarks.faults.fields import example_of
from memprof.cli.simulation_options import settings_of
from memprof.config.from_recording import settings_like
from memprof.config.settings import Settings
from memprof.plan.headline import headline_of_plan
from memprof.plan.methods import METHODS, methods_for
from memprof.report.plan import Plan, PlanRow

FOLLOWED = (
    "trainer", "dtype", "mixed_precision", "prompt_length", "completion_length", "per_device_train_batch_size",
    "gradient_accumulation_steps", "num_generations", "beta", "optim", "gradient_checkpointing", "generation", "attn",
    "lora_r", "recipe", "padding",
)  # fmt: skip
TINY = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
WORDS: list[dict[str, Any]] = [
    {"completion_length": 24},
    {"completion_length": 24, "lora_r": 4, "beta": 0.04},
    {"completion_length": 24, "optim": "adafactor", "gradient_accumulation_steps": 2},
    {"completion_length": 24, "num_generations": 4, "per_device_train_batch_size": 4},
    {"completion_length": 24, "trainer": "rloo", "num_generations": 4},
    {"completion_length": 24, "gradient_checkpointing": "none"},
]


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path / "model")


def _followed(settings: Settings | dict[str, Any]) -> dict[str, Any]:
    plain = settings.to_dict() if isinstance(settings, Settings) else settings
    return {name: plain[name] for name in FOLLOWED}


def _trls_source(words: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a recording keeps of a run whose config is TRL's own with these words, and the model loaded by name."""
    pytest.importorskip("peft")
    trl = pytest.importorskip("trl")
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from memprof.recording.run_facts import collect_facts, collect_setup

    given = {"max_completion_length" if name == "completion_length" else name: v for name, v in words.items()}
    kind = given.pop("trainer", "grpo")
    rank = given.pop("lora_r", None)
    if given.get("gradient_checkpointing") == "none":
        given["gradient_checkpointing"] = False
    config = getattr(trl, f"{kind.upper()}Config")
    arguments = config(output_dir=str(folder / "out"), report_to=[], use_cpu=True, **given)
    model: Any = LlamaForCausalLM(LlamaConfig(**{n: v for n, v in TINY.items() if n != "model_type"}))
    if rank is not None:
        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    name = "RLOOTrainer" if kind == "rloo" else "GRPOTrainer"
    trainer = type(name, (SimpleNamespace,), {})(args=arguments, model=model, ref_model=None)
    return {"kind": "cuda", "world_size": 1, "config": collect_facts(trainer), "setup": collect_setup(trainer)}


@pytest.mark.parametrize("words", WORDS, ids=lambda words: " ".join(f"{n}={v}" for n, v in words.items()))
def test_a_recorded_run_of_the_same_words_is_simulated_alike(
    words: dict[str, Any], tiny: str, tmp_path: Path
) -> None:
    asked = settings_of(None, {"model": tiny, **words})
    likeness = settings_like(_trls_source(words, tmp_path))
    assert _followed(likeness.settings) == _followed(asked)
    # A prompt's length is the data's, and no recording of a config alone holds it: both say so.
    assert "prompt_length" in likeness.settings.assumed
    assert "prompts of 512 tokens (the data decide)" in likeness.words()


def test_a_default_that_is_not_trls_is_said(tiny: str, tmp_path: Path) -> None:
    theirs = settings_like(_trls_source({}, tmp_path)).settings
    asked = settings_of(None, {"model": tiny})
    differ = {name for name, value in _followed(theirs).items() if value != _followed(asked)[name]}
    assert differ == {"completion_length"}
    words = headline_of_plan(_plan_of({"all": asked}), asked.assumed).assumed
    assert f"completions of 256 tokens (TRL's default is {theirs.completion_length})" in words


def _plan_of(rows: dict[str, Settings]) -> Plan:
    listed = [
        {**example_of(PlanRow), "method": name, "config": settings.to_dict(), "categories": {"weights": 1}}
        for name, settings in rows.items()
    ]
    return msgspec.convert({**example_of(Plan), "rows": listed, "gpu": "24GB", "best": None}, Plan)


@pytest.mark.parametrize("words", [{}, {"lora_r": 8}, {"dtype": "float32"}, {"lora_r": 8, "dtype": "float32"}])
def test_what_a_method_sets_otherwise_is_said(words: dict[str, Any], tiny: str) -> None:
    """A plan's rows have the settings of ``simulate`` but for what a method is; its screen names that, with dtypes."""
    asked = settings_of(None, {"model": tiny, **words})
    rows = {method.name: settings for method, settings in methods_for(asked, set(words))}
    own = {"lora_r", "load_in_4bit", "dtype", "optim", "gradient_checkpointing", "recipe"} - set(words)
    assert {name for method in METHODS for name in method.settings} <= {*own, *words}
    for settings in rows.values():
        changed = {name for name, value in _followed(settings).items() if value != _followed(asked)[name]}
        assert changed <= own
    said = "; ".join(headline_of_plan(_plan_of(rows), asked.assumed).assumed)
    dtypes = {settings.dtype for settings in rows.values()}
    if "dtype" in words:
        assert "weights" not in said
    elif len(dtypes) == 1:
        assert f"{dtypes.pop()} weights (TRL's default is float32)" in said
    else:
        assert "float32 weights in full, full + checkpointing, bfloat16 in the others" in said
    assert "checkpointing" in said.partition("each method's own")[2]


@pytest.mark.slow
@pytest.mark.trl
def test_the_commands_simulate_the_same_run(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command is run as it is typed, with few words, and its JSON says what it simulated."""
    for package in ("torch", "transformers", "trl", "peft"):
        pytest.importorskip(package)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ["--model", tiny, "--completion-length", "24", "--num-generations", "4"]
    made = tmp_path / "made.pickle"
    simulated = _json("simulate", *words, "-o", str(made), "--json", "-")
    asked = simulated["source"]["config"]
    planned = _json("plan", *words, "--gpu", "24GB", "--vary", "beta=0.0", "--workers", "1", "--json", "-")
    assert _followed(planned["rows"][0]["config"]) == _followed(asked)
    like = _json("simulate", "--like", str(made), "--set", "beta=0.04", "--gpu", "24GB", "--json", "-")
    configs = [run["report"]["source"]["config"] for run in like["runs"]]
    assert [_followed(config) for config in configs] == [_followed(asked), {**_followed(asked), "beta": 0.04}]
    # Both are on the GPU given, as the plan's row is: what differs is the setting's, not the card's.
    assert planned["rows"][0]["peak_bytes"] == like["runs"][0]["report"]["peak"]["allocated_bytes"]
    assert len({run["report"]["source"]["device_total_bytes"] for run in like["runs"]}) == 1
    advised = _json("advise", str(made), "--estimate", "--json", "-")
    assert _followed(advised["source"]["config"]) == _followed(asked)
    assert advised["headline"]["assumed"] == simulated["headline"]["assumed"]
    assert like["headline"]["assumed"][:1] == planned["headline"]["assumed"][:1] == simulated["headline"]["assumed"][:1]


def _json(*arguments: str) -> dict[str, Any]:
    from memprof.cli import main

    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
