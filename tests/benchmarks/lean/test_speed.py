"""The baselines that the lean trainer's time is measured against, and the columns that tell a row's price."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from benchmarks.lean.speed import head_as_on_cuda, rows_of
from benchmarks.lean.tables import _decoding, _price


def test_micro_batches_of_one_row_keep_what_is_the_whole_batchs() -> None:
    inputs = {"prompt_ids": torch.arange(6).view(2, 3), "advantages": torch.tensor([1.0, 2.0]),
              "num_items_in_batch": torch.tensor(5)}  # fmt: skip
    first, second = rows_of(inputs)
    assert first["prompt_ids"].tolist() == [[0, 1, 2]]
    assert second["prompt_ids"].tolist() == [[3, 4, 5]]
    assert second["advantages"].tolist() == [2.0]
    assert first["num_items_in_batch"] == second["num_items_in_batch"] == 5


def test_trls_head_leaves_out_prompts_and_padding_as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.trainer import utils

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    utils.add_fused_lm_head(model)
    projected: list[int] = []
    real = utils._ChunkedLogProbFunction

    class Seen:
        @staticmethod
        def apply(hidden: Any, *given: Any) -> Any:
            projected.append(len(hidden))
            return real.apply(hidden, *given)

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Seen)
    ids = torch.randint(64, (2, 8))
    labels = ids.clone()
    labels[:, :4], labels[1, 6:] = -100, -100  # prompts; padding
    here = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
    with head_as_on_cuda():
        fair = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
    assert projected == [2 * 7, 4 + 2]
    assert torch.allclose(here, fair, atol=1e-6)


def test_a_row_tells_its_price() -> None:
    seconds = {"RTX 4090": {"step": 1234.4}, "H100": {"step": 56.7}}
    price = {"passes": 4, "decode_steps": 79_872, "estimated_seconds": seconds}
    assert _price({"settings": {"on": "RTX 4090"}, "price": price}) == "1,234"
    assert _price({"settings": {}}) == "–"


def test_a_generation_in_passes_decodes_once_for_each() -> None:
    settings = {"prompt_length": 512}
    assert _decoding({"longest": 8704, "settings": settings}) == [1, "8,192"]
    assert _decoding({"longest": 8704, "settings": {**settings, "generation_batch": 1}}) == [8, "65,536"]
    assert _decoding(None) == ["–", "–"]
