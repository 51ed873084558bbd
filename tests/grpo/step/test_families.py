"""A step of families that differ from Llama in what matters here: positions, biases, caps, states, tied heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.grpo.trainers import TOLERANCE, VOCABULARY, batch, build, loss_and_gradients, with_policies, worst

pytestmark = pytest.mark.trl

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
    "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 3,
}  # fmt: skip
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
_MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 8, "attn_implementation": "eager"},  # caps attention's scores and logits
    "gemma3_text": {"head_dim": 8, "sliding_window": 6},
    "phi": {"tie_word_embeddings": True},  # a tied head with a bias
    "cohere": {},  # scaled logits, tied
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "gpt2": _GPT2,  # learned positions count from the row's left edge
    "bloom": {"n_layer": 2, "n_head": 4},  # ALiBi
    "mamba": {"state_size": 4},
    "falcon_h1": {"head_dim": 8, **_MAMBA},
    "falcon": {"alibi": True},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}


def random_model(family: str, changes: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**_COMMON, **changes})
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_trls(family: str, tmp_path: Path) -> None:
    model = random_model(family, FAMILIES[family])
    theirs, ours = build("trl", model, tmp_path), build("lean", model, tmp_path, max_tokens_per_piece=40)
    assert ours._whole_batch_reason is None
    inputs = with_policies(theirs, batch(off_policy=False), beta=0.0)
    loss, gradients, metrics = loss_and_gradients(theirs, inputs)
    lean_loss, lean_gradients, lean_metrics = loss_and_gradients(ours, inputs)
    assert lean_loss == pytest.approx(loss, rel=TOLERANCE)
    assert worst(lean_gradients, gradients) <= TOLERANCE
    assert lean_metrics["entropy"] == pytest.approx(metrics["entropy"], rel=1e-4)


def test_a_family_that_reads_padding_keeps_trls_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """RWKV takes an attention mask and does not use it: without padding its values are others."""
    model = random_model("rwkv", {"attention_hidden_size": 32})
    theirs, ours = build("trl", model, tmp_path), build("lean", model, tmp_path)
    inputs = with_policies(theirs, batch(off_policy=False), beta=0.0)
    found = [loss_and_gradients(trainer, inputs) for trainer in (theirs, ours)]
    assert "TRL's own step is used: rwkv reads the padding" in caplog.text
    assert worst(found[1][1], found[0][1]) <= TOLERANCE
    otherwise = {**inputs, "prompt_ids": inputs["prompt_ids"].where(inputs["prompt_mask"].bool(), 7)}
    assert worst(loss_and_gradients(theirs, otherwise)[1], found[0][1]) > 1e-3


@pytest.mark.parametrize("switch", ["packing", "prefix_sharing"])
@pytest.mark.parametrize("family", ["stablelm", "bloom", "nemotron", "falcon"])
def test_a_family_whose_attention_takes_no_arguments_goes_in_plain_pieces(
    family: str, switch: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = random_model(family, FAMILIES.get(family, {}))
    theirs = build("trl", model, tmp_path)
    ours = build("lean", model, tmp_path, max_tokens_per_piece=400, **{switch: True})
    inputs = with_policies(theirs, batch(off_policy=False), beta=0.0)
    found = [loss_and_gradients(trainer, inputs) for trainer in (theirs, ours)]
    assert worst(found[1][1], found[0][1]) <= TOLERANCE
    assert "hands no arguments down to its attention" in caplog.text
