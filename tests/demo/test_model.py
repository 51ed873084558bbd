"""The demo's checkpoint folder."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from memprof.demo import model
from memprof.demo.model import prepare_checkpoint


def test_tiny_checkpoint_loads_and_talks(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = prepare_checkpoint(tmp_path, tiny=True)
    loaded = AutoModelForCausalLM.from_pretrained(made.path)
    tokenizer = AutoTokenizer.from_pretrained(made.path)
    chat = [{"role": "user", "content": "2 + 2 <answer>"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert max(ids) < loaded.config.vocab_size == len(tokenizer)
    assert tokenizer.decode(ids) == "<|start|>user: 2 + 2 <answer><|end|><|start|>assistant: "


def test_checkpoint_is_made_once(tmp_path: Path) -> None:
    first = prepare_checkpoint(tmp_path, tiny=True)
    (first.path / "mark").touch()
    assert prepare_checkpoint(tmp_path, tiny=True) == first
    assert (first.path / "mark").exists()


def test_interrupted_save_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_save_tiny", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_checkpoint(tmp_path, tiny=True)
    monkeypatch.undo()
    assert not (tmp_path / "tiny-random-llama").exists()
    assert (prepare_checkpoint(tmp_path, tiny=True).path / "model.safetensors").is_file()


def test_without_the_wheel_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "find_spec", lambda name: None)
    made = prepare_checkpoint(tmp_path)
    assert not made.real
    assert "not installed" in made.note
