"""A config is read the same from a file and from transformers, and the closed forms are those of real models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from memprof.config.catalogue import find_config
from memprof.config.model_shape import FAMILIES, ModelShape
from memprof.errors import InputError
from tests.config.test_catalogue import PARAMETERS

# Extents that are all different, so that none can stand for another.
TINY = {
    "hidden_size": 72,
    "intermediate_size": 112,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 301,
    "sliding_window": 5,
}
MIXTURES = {
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
}


def _config(kind: str, **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.AutoConfig.for_model(kind, **{**TINY, **MIXTURES.get(kind, {}), **ends, **changes})


def _built(config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_catalogues_models_have_as_many_parameters(name: str) -> None:
    assert ModelShape.of(find_config(name)).parameters == PARAMETERS[name]


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_is_counted_to_the_parameter(kind: str) -> None:
    config = _config(kind)
    shape = ModelShape.of(config)
    assert shape.parameters == sum(p.numel() for p in _built(config).parameters())
    assert shape == ModelShape.of(config.to_dict())


#: What configs of the families can ask for, and what changes the number of parameters.
VARIANTS: tuple[dict[str, Any], ...] = (
    {"attention_bias": True}, {"mlp_bias": True}, {"use_bias": True}, {"attention_bias": True, "mlp_bias": True},
    {"tie_word_embeddings": True}, {"tie_word_embeddings": False}, {"use_qk_norm": True}, {"use_qk_norm": False},
    {"decoder_sparse_step": 2}, {"decoder_sparse_step": 3, "mlp_only_layers": [2]}, {"mlp_only_layers": [0, 5]},
    {"num_key_value_heads": 6}, {"head_dim": 12}, {"attention_out_bias": True}, {"add_bias_linear": True},
)  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_config_of_the_family_can_ask_for_is_counted(kind: str) -> None:
    plain, tried = _config(kind).to_dict(), 0
    for changes in VARIANTS:
        if not changes.keys() <= plain.keys():  # its config has no such option
            continue
        config = _config(kind, **changes)
        counted = sum(p.numel() for p in _built(config).parameters())
        assert ModelShape.of(config).parameters == counted, changes
        assert ModelShape.of(config.to_dict()).parameters == counted, changes
        tried += 1
    assert tried >= 3


def test_a_file_without_experts_is_dense() -> None:
    """``"num_experts": 0`` used to be passed over for the 128 that a file has without the field."""
    values = {**TINY, "model_type": "qwen3_moe", "num_experts": 0, "decoder_sparse_step": 1}
    built = _built(_config("qwen3_moe", num_experts=0))
    assert ModelShape.of(values).parameters == sum(p.numel() for p in built.parameters())


#: Fields that other families' configs have: the code of this one may not read them.
FOREIGN = (
    "attention_bias", "mlp_bias", "use_bias", "bias", "qkv_bias", "attention_qkv_bias", "use_qk_norm",
    "attention_out_bias", "add_bias_linear", "use_sliding_window",
)  # fmt: skip


def _perturbed(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what was changed and a config's values: each boolean flipped, each field left out and ``null``."""
    short = {**TINY, **MIXTURES.get(kind, {})}
    full = {name: value for name, value in _config(kind).to_dict().items() if name != "model_type"}
    flags = {name: not value for name, value in full.items() if isinstance(value, bool)}
    for name in dict.fromkeys([*FOREIGN, *flags]):
        yield f"{name}: {flags.get(name, True)}", {**full, name: flags.get(name, True)}
    for values in (short, full):
        for name in values:
            yield f"without {name}", {key: value for key, value in values.items() if key != name}
            yield f"{name}: null", {**values, name: None}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_changed_config_is_counted_as_it_is_built(kind: str) -> None:
    """Mistral's code ignores ``attention_bias``, and a file without ``head_dim`` has the default of its class."""
    transformers = pytest.importorskip("transformers")
    wrong, tried = {}, 0
    for what, values in _perturbed(kind):
        try:
            config = transformers.AutoConfig.for_model(kind, **values)
            counted = sum(p.numel() for p in _built(config).parameters())
        except Exception:  # transformers refuses or cannot build it
            continue
        shape = ModelShape.of(config)
        found = {shape.parameters}
        with contextlib.suppress(InputError):  # of a size without which nothing is counted
            alone = ModelShape.of({**values, "model_type": kind})
            found.add(alone.parameters)
            # A model that sees both ways does not generate; transformers halves its window each time it is read.
            if alone.caches != shape.caches and not values.get("use_bidirectional_attention"):
                wrong[f"{what}, caches"] = {0}
        if found != {counted}:
            wrong[what] = found
        tried += 1
    assert not wrong
    assert tried > 40


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("targets", ["all-linear", ["o_proj"]])
def test_an_adapter_has_as_many_parameters(kind: str, targets: Any) -> None:
    peft = pytest.importorskip("peft")
    config = _config(kind)
    model = peft.get_peft_model(_built(config), peft.LoraConfig(r=3, target_modules=targets, task_type="CAUSAL_LM"))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    named = (targets,) if isinstance(targets, str) else targets
    assert ModelShape.of(config).adapter_parameters(3, named) == trained


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "gemma2", "gemma3_text"])
def test_keys_and_values_are_those_a_model_keeps(kind: str) -> None:
    """Eleven tokens, of which a window keeps its size less the one that is asked with."""
    torch = pytest.importorskip("torch")
    config = _config(kind)
    with torch.no_grad():
        cache = _built(config).to_empty(device="cpu")(torch.zeros(1, 11, dtype=torch.long), use_cache=True)
    layers = cache.past_key_values.layers
    held = sum(part.numel() for layer in layers for part in (layer.keys, layer.values))
    # transformers keeps one token less than the window: the next one completes it.
    short = sum("Sliding" in type(layer).__name__ for layer in layers)
    expected = ModelShape.of(config).kv_cache_bytes(11, 1) - short * 2 * 24 * 2
    assert held == expected
    assert short == sum(kind == "sliding_attention" for kind in ModelShape.of(config).layer_kinds)


def test_layers_without_keys_and_values_hold_none() -> None:
    values = {**TINY, "model_type": "qwen3_next", "layer_types": ["linear_attention"] * 6 + ["full_attention"]}
    assert ModelShape.of(values).kv_cache_bytes(10, 2) == 10 * 2 * 2 * 24 * 2


def test_values_may_be_narrower_than_keys() -> None:
    shape = ModelShape.of({**TINY, "v_head_dim": 16, "sliding_window": None})
    assert shape.kv_cache_bytes(10, 2) == 10 * 7 * 2 * (24 + 16) * 2
    assert shape.linear_layers["o_proj"] == (6 * 16, 72)


def test_the_language_model_inside_is_read() -> None:
    outer = {"model_type": "gemma3", "text_config": {**TINY, "model_type": "gemma3_text"}, "vision_config": {}}
    assert ModelShape.of(outer) == ModelShape.of({**TINY, "model_type": "gemma3_text"})


def test_what_is_not_said_follows_from_the_rest() -> None:
    shape = ModelShape.of({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 9})
    assert (shape.head_dim, shape.kv_heads, shape.intermediate, shape.tied) == (16, 4, 256, False)
    assert ModelShape.of({**TINY, "intermediate_size": [3, 8, 5]}).intermediate == 8


def test_a_number_that_was_counted_is_believed() -> None:
    assert ModelShape.of(TINY, counted=12345).parameters == 12345


@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"])
def test_a_missing_size_is_named(name: str) -> None:
    with pytest.raises(InputError, match=f"lacks its {name}"):
        ModelShape.of({**TINY, name: None})
