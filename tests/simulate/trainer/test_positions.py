"""How far a model's positions reach, for every way transformers scales them, and the note beyond."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memprof.config.model_shape import positions_of

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values", "reach"),
    [
        ("llama", {"max_position_embeddings": 256}, 256),
        ("qwen2", {"max_position_embeddings": 32768, "rope_parameters": dict(YARN)}, 131072),
        (
            "qwen2",
            {"max_position_embeddings": 131072, "rope_parameters": {**YARN, "original_max_position_embeddings": 32768}},
            131072,
        ),
        ("llama", {"max_position_embeddings": 131072, "rope_parameters": dict(LLAMA3)}, 131072),
        (
            "llama",
            {
                "max_position_embeddings": 4096,
                "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
            },
            16384,
        ),
        ("gpt2", {"n_positions": 1024}, 1024),
        ("bloom", {}, None),
        ("falcon", {"alibi": True}, None),
    ],
)
def test_positions_reach_as_far_as_their_scaling(kind: str, values: dict[str, Any], reach: int | None) -> None:
    transformers = pytest.importorskip("transformers")
    assert positions_of(transformers.AutoConfig.for_model(kind, **values)) == reach
    assert positions_of({"model_type": kind, **values}) == reach
    assert positions_of({"model_type": "wrapper", "text_config": {"model_type": kind, **values}}) == reach
    if (rope := values.get("rope_parameters")) is not None:  # as config.json wrote it before transformers 5
        older = {"type": rope["rope_type"], **{n: v for n, v in rope.items() if n != "rope_type"}}
        assert positions_of({**values, "rope_parameters": None, "rope_scaling": older}) == reach


def test_a_run_beyond_the_positions_says_so(settings_for: Callable[..., Any]) -> None:
    from memprof.simulate.run import simulate_settings

    def said(completion: int) -> list[str]:
        settings = settings_for(generation="none", prompt_length=56, completion_length=completion)
        notes = simulate_settings(settings, stacks=False)["memprof"]["notes"]
        return [note for note in notes if "positions" in note]

    assert said(200) == []  # the model's 256 in all
    assert said(201) == [
        "Sequences of 257 tokens are longer than this model's positions reach (256 tokens): memory is what a run of "
        "this length needs, and the model was not trained for it."
    ]


@pytest.mark.parametrize(("kind", "sizes"), [("gpt2", {"n_positions": 64}), ("opt", {"max_position_embeddings": 64})])
def test_a_table_of_positions_ends_a_real_run(kind: str, sizes: dict[str, int]) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from memprof.simulate.trainer.training import notes_on_length

    small = {"vocab_size": 96, "n_embd": 32, "n_layer": 1, "n_head": 2} if kind == "gpt2" else {
        "vocab_size": 96, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **small, **sizes))
    model(torch.zeros(1, 64, dtype=torch.long))
    assert notes_on_length(model, 64) == []
    with pytest.raises(IndexError):
        model(torch.zeros(1, 65, dtype=torch.long))
    (note,) = notes_on_length(model, 65)
    assert "a real run ends in an index error" in note
