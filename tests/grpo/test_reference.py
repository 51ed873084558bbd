"""The reference in host memory on architectures whose layers cannot be run one by one, and on those that can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memprof.grpo.reference import HostReference
from tests.grpo.trainers import VOCABULARY, batch, build, tokenizer

pytestmark = pytest.mark.trl

# Per architecture: its sizes, and what the log says where it goes to the device.
_SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 3, "eos_token_id": 2}
_NO_LAYERS = "not all decoder layers with attention"
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "llama": ({"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}, None),
    "lfm2": (
        {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}, _NO_LAYERS,
    ),
    "mamba": ({"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, _NO_LAYERS),
    "falcon_h1": (
        {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8,
         "mamba_d_state": 8}, "",
    ),
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 4}, ""),
    "mpt": ({"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}, ""),
}  # fmt: skip


def saved(family: str, folder: Path) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **_SMALL, **CASES[family][0])).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def reference_logps(trainer: Any) -> torch.Tensor:
    inputs = batch(4)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        found: torch.Tensor = trainer._get_per_token_logps_and_entropies(trainer.ref_model, ids, mask, 13)[0]
    return found


@pytest.mark.parametrize("family", CASES)
def test_the_reference_answers_whatever_its_layers_are(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, why = saved(family, tmp_path / "model"), CASES[family][1]
    host, device = (
        build("lean", model, tmp_path / place, beta=0.04, reference=place, max_tokens_per_piece=30)
        for place in ("host", "device")
    )
    assert isinstance(host.ref_model, HostReference)
    found = reference_logps(host)
    assert torch.equal(found, reference_logps(device))
    assert found.abs().sum() > 1
    said = [r.message for r in caplog.records if "the reference is held on the device: its" in r.message]
    assert len(said) == (why is not None)
    assert why is None or why in said[0]
    assert torch.equal(reference_logps(host), found)
