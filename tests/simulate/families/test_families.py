"""Every family of ``docs/models.md`` goes through a GRPO step, or says in one sentence why it does not."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from memprof.config.model_shape import FAMILIES as COUNTED
from memprof.config.model_shape import ModelShape
from memprof.config.settings import Settings
from memprof.errors import InputError
from tests.simulate.families.shapes import FAMILIES, PAGE, Family, four_layers
from tests.simulate.test_closed_forms import _analysis, _requested

pytestmark = pytest.mark.trl

# The rest takes more than two minutes: make test-all.
SAMPLE = ("qwen3_next", "deepseek_v3", "gpt_oss", "gemma4", "qwen3_vl")
# Refused for the same missing attribute as a quicker one.
ALSO_REFUSED = ("deepseek_v4", "phimoe", "granitemoehybrid", "llama4")
ROWS, PROMPT, COMPLETION = 2, 11, 21
# Keys are turned by angles in the dtype of the stream, which autocast makes float32; values are joined to their dtype.
IN_FLOAT32 = ("gemma3n_text",)


def _settings(folder: Path, kind: str, **changes: Any) -> Settings:
    (folder / "config.json").write_text(json.dumps(four_layers(kind)))
    values: dict[str, Any] = {
        "dtype": "bfloat16",
        "per_device_train_batch_size": ROWS,
        "num_generations": 2,
        "prompt_length": PROMPT,
        "completion_length": COMPLETION,
    }
    return Settings(model=str(folder), **{**values, **changes})


def _weights_of(folder: Path) -> tuple[Any, int, int]:
    """Read a family's config, its parameters and the bytes of weights and buffers that transformers makes of them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        except ValueError:
            model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    parameters = list(model.parameters())
    nbytes = sum(t.nbytes for t in (*parameters, *model.buffers()))
    return config, sum(p.numel() for p in parameters), nbytes


def _highest_cache(config: Any) -> int:
    """Bytes of keys and values at their highest: a layer's are concatenated, the others have a token more or less.

    Where there is a window the old keys stay until the new values are there.
    """
    shape = ModelShape.of(config)
    tokens = PROMPT + COMPLETION - 1  # the last token is sampled, never fed back
    after, before = ([layer.key_value_bytes(n, 2) for layer in shape.caches] for n in (tokens, tokens - 1))
    highest = 0
    for index, layer in enumerate(shape.caches):
        others = sum(after[:index]) + sum(before[index + 1 :])
        second = _share_of_values(config, shape)
        while_keys = after[index] * (1 - second) + before[index]
        while_values = after[index] + before[index] * (1 if layer.window else second)
        highest = max(highest, others + int(max(while_keys, while_values)))
    return ROWS * highest


def _share_of_values(config: Any, shape: ModelShape) -> Fraction:
    """Which share of a layer's cache is the part that is concatenated last; DeepSeek's is the rotary key."""
    text = config.get_text_config()
    if not shape.heads:
        return Fraction(0)
    if latent := getattr(text, "kv_lora_rank", None):
        return Fraction(text.qk_rope_head_dim, latent + text.qk_rope_head_dim)
    return Fraction(shape.value_dim, shape.head_dim + shape.value_dim)


def test_every_line_of_the_page_is_read() -> None:
    """Names that a line break keeps from their words, or a row of another form, would leave families untested."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"- \*\*|  `|  \(|\| `", line)]
    assert set(re.findall(r"`(\w+)`", "".join(lines))) == {family.kind for family in FAMILIES}


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f.kind in SAMPLE else [pytest.mark.heavy]) for f in FAMILIES if not f.reason],
    ids=str,
)
def test_a_family_holds_what_its_config_says(family: Family, tmp_path: Path) -> None:
    settings = _settings(tmp_path, family.kind)
    found = _analysis(settings)
    config, parameters, weights = _weights_of(tmp_path)
    shape = ModelShape.of(config)
    assert _requested(found, "weights") == weights
    if shape.model_type in COUNTED and not hasattr(config, "vision_config"):
        assert shape.parameters == parameters
    width = 2 if family.kind in IN_FLOAT32 else 1
    assert _requested(found, "kv_cache") == width * _highest_cache(config)


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[pytest.mark.heavy] if f.kind in ALSO_REFUSED else []) for f in FAMILIES if f.reason],
    ids=str,
)
def test_a_family_that_is_not_simulated_says_why(family: Family, tmp_path: Path) -> None:
    from memprof.simulate.run import simulate_settings

    with pytest.raises(InputError) as caught:
        simulate_settings(_settings(tmp_path, family.kind), stacks=False)
    assert family.reason.strip("*") in str(caught.value)
