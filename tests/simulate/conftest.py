"""A small Llama, whose sizes are all different so that no two tensors weigh the same, as a folder with a config."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

TINY = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    for package in ("torch", "transformers", "trl", "peft"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


@pytest.fixture(scope="session")
def settings_for(tiny: str) -> Callable[..., Any]:
    """Settings of a small run of the tiny model."""

    def make(**changes: Any) -> Any:
        from memprof.config.settings import Settings

        values: dict[str, Any] = {
            "model": tiny,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "prompt_length": 11,
            "completion_length": 21,
            "optim": "adamw_torch",
        }
        return Settings(**{**values, **changes})

    return make


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the modules of the shortcuts that simulations of this test take."""
    from memprof.simulate import shortcut_switches as plain

    found: list[str] = []
    load = plain.import_module

    def noted(name: str) -> Any:
        found.append(name)
        return load(name)

    monkeypatch.setattr(plain, "import_module", noted)
    return found
