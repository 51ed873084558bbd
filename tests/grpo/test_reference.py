"""The reference in host memory on architectures whose layers cannot be run one by one, and on those that can."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memprof.errors import UsageError
from tests.grpo import test_rloo
from tests.grpo.trainers import VOCABULARY, batch, build, saved_llama, tokenizer

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
    assert host._host_reference is not None
    found = reference_logps(host)
    assert torch.equal(found, reference_logps(device))
    assert found.abs().sum() > 1
    said = [r.message for r in caplog.records if "the reference stays on the device: its" in r.message]
    assert len(said) == (why is not None)
    assert why is None or why in said[0]
    assert torch.equal(reference_logps(host), found)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
@pytest.mark.parametrize("looked", [False, True], ids=["fresh", "after a pass"])
def test_the_reference_is_a_model_like_trls(method: str, looked: bool, tmp_path: Path) -> None:
    """Calls, generation, names and settings of ``trainer.ref_model``, before its first pass and after it."""
    checkpoint, make = saved_llama(tmp_path / "model"), build if method == "grpo" else test_rloo.build
    theirs, ours = (make(kind, checkpoint, tmp_path / kind, beta=0.04) for kind in ("trl", "lean"))
    assert ours._host_reference is not None
    before = {name: p.data_ptr() for name, p in ours.ref_model.named_parameters()}
    if looked:
        reference_logps(ours)
    ids = torch.arange(4, 24).reshape(2, 10)
    asked: list[Callable[[Any], Any]] = [
        lambda model: model(ids).logits.detach(),
        lambda model: model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.detach(),
        lambda model: model.model(input_ids=ids).last_hidden_state.detach(),
        lambda model: model.base_model(inputs_embeds=model.get_input_embeddings()(ids)[0].detach()[None])[0].detach(),
        lambda model: model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=1),
        lambda model: copy.deepcopy(model)(ids).logits.detach(),
        lambda model: torch.tensor(sum(p.numel() for p in model.parameters())),
    ]
    for ask in asked:
        meant, found = ask(theirs.ref_model), ask(ours.ref_model)
        assert torch.equal(found, meant)
    for name in ("dtype", "device", "training", "name_or_path", "vocab_size"):
        assert getattr(ours.ref_model, name) == getattr(theirs.ref_model, name), name
    meant, found = theirs.ref_model.state_dict(), ours.ref_model.state_dict()
    assert list(found) == list(meant)
    assert all(torch.equal(found[name], meant[name]) for name in meant)
    ours.ref_model.save_pretrained(tmp_path / "saved")
    assert type(ours.ref_model) is type(theirs.ref_model)
    assert {name: p.data_ptr() for name, p in ours.ref_model.named_parameters()} == before


def test_a_gradient_through_the_hosts_reference_is_an_error(tmp_path: Path) -> None:
    ours = build("lean", saved_llama(tmp_path / "model"), tmp_path, beta=0.04)
    given = torch.zeros(1, 4, 32, requires_grad=True)
    with pytest.raises(UsageError, match=r"Set reference='device'\.$"):
        ours.ref_model(inputs_embeds=given)
