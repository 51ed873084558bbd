"""What the benchmark of TRL's own tests counts, and that its stand-ins are what the tests load."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("trl")

import torch

from benchmarks.trl_suite.compare import compared, printed, read_outcomes
from benchmarks.trl_suite.plugin import CALLBACK, LEAN, TRL, Outcome
from benchmarks.trl_suite.stand_ins import OWNER, load_dataset, make_models, models_named

pytestmark = pytest.mark.trl

SOURCE = f"""
model_id="{OWNER}/tiny-Qwen2ForCausalLM-2.5", reward="{OWNER}/tiny-Qwen2ForSequenceClassification-2.5"
vision="{OWNER}/tiny-LlavaForConditionalGeneration", other="{OWNER}/tiny-NoneSuchForCausalLM"
"""


def run_of(folder: Path, outcomes: list[Outcome], weight: float) -> dict[str, Outcome]:
    """Write a run as the plugin does: its outcomes, and one file of parameters."""
    folder.mkdir(parents=True)
    of = {"weight": torch.tensor([3.0, weight])}
    torch.save({"parameters": of, "gradient": of}, folder / "0000.pt")
    lines = [json.dumps(asdict(one)) for one in outcomes]
    (folder / "outcomes.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_outcomes(folder)


def test_a_test_that_fails_with_trls_trainer_counts_for_none(tmp_path: Path) -> None:
    meant = [
        Outcome("trains", "passed", "", 1.0, ["0000.pt"]),
        Outcome("raises", "passed", "", 1.0, []),
        Outcome("of another version", "failed", "AttributeError: x", 1.0, []),
        Outcome("needs a GPU", "skipped", "Skipped: no GPU", 0.0, []),
    ]
    worse = [meant[0], Outcome("raises", "failed", "DID NOT RAISE", 1.0, []), *meant[2:]]
    outcomes = {
        TRL: run_of(tmp_path / TRL, meant, 4.0),
        CALLBACK: run_of(tmp_path / CALLBACK, meant, 4.0),
        LEAN: run_of(tmp_path / LEAN, worse, 4.5),
    }
    found = compared("grpo", outcomes, tmp_path)
    assert (found.applicable, found.passed) == (2, {TRL: 2, CALLBACK: 2, LEAN: 1})
    assert [(one.test, one.way, one.said) for one in found.worse] == [("raises", LEAN, "DID NOT RAISE")]
    assert {one.way: (one.gradient, one.same_parameters) for one in found.distances} == {
        CALLBACK: (0.0, True),
        LEAN: (pytest.approx(0.1), False),
    }
    text = printed([found])
    assert "| grpo | 4 | 2 | 2 of 2 | 1 of 2 |" in text
    assert "grpo, callback: of 1 tests that train, 1 leave parameters equal to the bit" in text


def test_stand_ins_load_under_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = tmp_path / "test_x.py"
    source.write_text(SOURCE, encoding="utf-8")
    names = models_named([source])
    assert "tiny-LlavaForConditionalGeneration" not in names
    failed = make_models(names, tmp_path / "hub")
    assert list(failed) == ["tiny-NoneSuchForCausalLM"]
    name = f"{OWNER}/tiny-Qwen2ForCausalLM-2.5"
    offline = {"cache_dir": tmp_path / "hub", "local_files_only": True}
    model, tokens = (kind.from_pretrained(name, **offline) for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert tokens.decode(tokens("Ink dries, 7 ä").input_ids) == "Ink dries, 7 ä"
    assert model.config.vocab_size == len(tokens) > max(tokens("ä").input_ids)
    assert tokens.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)


def test_datasets_without_a_stand_in_are_refused() -> None:
    assert load_dataset(f"{OWNER}/zen", "standard_prompt_only", split="train").column_names == ["prompt"]
    assert set(load_dataset(f"{OWNER}/zen", "standard_prompt_only", streaming=True)) == {"train", "test"}
    with pytest.raises(ValueError, match="has no stand-in"):
        load_dataset(f"{OWNER}/zen-image", "conversational_prompt_only", split="train")
