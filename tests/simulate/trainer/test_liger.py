"""What is said of Liger's layers, which are not simulated, held to what a model's own network keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simulate.conftest import TINY


def _kept_by_the_models_own(tokens: int) -> int:
    """Bytes that transformers' SwiGLU keeps for backward in bfloat16, of the inner width."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    values = {name: value for name, value in TINY.items() if name != "model_type"}
    network, kept = LlamaMLP(LlamaConfig(**values)).to(torch.bfloat16), {}

    def keep(tensor: Any) -> Any:
        if tensor.shape[-1] == TINY["intermediate_size"] and tensor.shape[0] == tokens:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = network(torch.zeros(tokens, TINY["hidden_size"], dtype=torch.bfloat16, requires_grad=True))
    del out
    return sum(kept.values())


def test_the_note_says_what_ligers_swiglu_keeps_less(settings_for: Callable[..., Any], tiny: str) -> None:
    from memprof.simulate.trainer.models import load_config
    from memprof.simulate.trainer.recipes import liger_note
    from memprof.units import format_gib

    tokens = 4 * 32
    inner = 2 * tokens * TINY["intermediate_size"]  # type: ignore[operator]
    # gate, activated gate, up and their product; Liger keeps all but the second
    assert _kept_by_the_models_own(tokens) == 4 * inner
    long = {"prompt_length": 11 * 100_000, "completion_length": 21 * 100_000}  # so that it is more than 0.01 GiB
    settings, config = settings_for(recipe="liger", gradient_checkpointing=False, **long), load_config(tiny)
    every = format_gib(TINY["num_hidden_layers"] * inner * 100_000)  # type: ignore[operator]
    assert f"saves less for backward, by {every} GiB or more" in liger_note(settings, config)
    one = format_gib(inner * 100_000)
    assert f"by {one} GiB or more" in liger_note(settings.with_(gradient_checkpointing=True), config)
    from transformers import GPT2Config

    assert liger_note(settings, GPT2Config()).endswith("saves less for backward.")


def test_a_run_of_that_recipe_says_so_or_what_it_lacks(settings_for: Callable[..., Any]) -> None:
    pytest.importorskip("liger_kernel")
    from memprof.simulate.run import simulate_settings

    notes = simulate_settings(settings_for(recipe="liger", generation="none"), stacks=False)["memprof"]["notes"]
    assert any("its layers (use_liger_kernel" in note for note in notes)


def test_a_model_whose_inner_part_has_another_name_is_simulated(
    settings_for: Callable[..., Any], tmp_path: Path
) -> None:
    """GPT-2's is its ``transformer``, Mamba's its ``backbone``."""
    pytest.importorskip("liger_kernel")
    from memprof.simulate.run import simulate_settings

    shapes = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 6, "vocab_size": 1000, "n_positions": 256}
    (tmp_path / "config.json").write_text(json.dumps(shapes))
    raw = simulate_settings(settings_for(model=str(tmp_path), recipe="liger", generation="none"), stacks=False)
    assert raw["memprof"]["highest"]["allocated_bytes"] > 0
