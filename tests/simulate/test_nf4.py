"""4-bit layers: how they are loaded, what they hold, and what a product asks for.

``tests/cuda/emulator/test_bitsandbytes.py`` holds the same layer against bitsandbytes' own on torch's CUDA allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from memprof.simulate.run import simulate, simulate_settings  # noqa: E402
from tests.simulate.conftest import TINY  # noqa: E402

_HIDDEN, _WIDE = TINY["hidden_size"], TINY["intermediate_size"]
_KV = TINY["num_key_value_heads"] * TINY["head_dim"]
_OUT, _IN = 192, 320
_WEIGHT = _OUT * _IN


def sizes(raw: dict[str, Any]) -> list[int]:
    return [e["size"] for e in raw["device_traces"][0] if e["action"] == "alloc"]


def quantised(rows: int, columns: int) -> list[int]:
    """What ``quantize_4bit`` asks for: the weight as it was, scales, halves of bytes, the code and what divides it."""
    count = rows * columns
    return [2 * count, -(-count // 64) * 4, count // 2, 16 * 4, 16 * 4, 4]


def test_weights_are_packed_one_after_the_other_while_they_are_loaded(settings_for: Callable[..., Any]) -> None:
    asked = settings_for(lora_r=4, load_in_4bit=True, dtype="bfloat16", generation="none")
    found = sizes(simulate_settings(asked, stacks=False))
    embedding, norm = 2 * TINY["vocab_size"] * _HIDDEN, 2 * _HIDDEN
    mlp = [(_HIDDEN, _WIDE), (_WIDE, _HIDDEN), (_WIDE, _HIDDEN)]  # down, gate, up: in the order of their names
    attention = [(_KV, _HIDDEN), (_HIDDEN, _HIDDEN), (_HIDDEN, _HIDDEN), (_KV, _HIDDEN)]  # k, o, q, v
    layer = [norm, *_of_all(mlp), norm, *_of_all(attention)]
    expected = [8, embedding, embedding, *layer, *layer, norm]  # no room is taken first: 2 MiB are there
    assert found[: len(expected)] == expected


def _of_all(shapes: list[tuple[int, int]]) -> list[int]:
    return [size for shape in shapes for size in quantised(*shape)]


def a_layer(double: bool, work: Callable[[Any, Any], Any], tokens: int) -> list[int]:
    """List what ``work(layer, input)`` asks for, after all that the layer holds."""
    from memprof.simulate.fake_cuda.nf4 import Linear4bit, Nf4

    before: list[int] = []

    def run(session: Any) -> None:
        original = torch.nn.Linear(_IN, _OUT, bias=False, dtype=torch.bfloat16)
        layer = Linear4bit(original, Nf4(torch.bfloat16, double))
        x = torch.empty(1, tokens, _IN, dtype=torch.bfloat16, requires_grad=True)
        session.fake_recorder.kernels.workspace = 0
        before.append(len(sizes(session.fake_recorder.dump()[0])))
        work(layer, x)

    return sizes(simulate(run))[before[0] :]


def test_a_config_s_defaults_are_transformers() -> None:
    from memprof.simulate.fake_cuda.nf4 import Nf4

    config = pytest.importorskip("transformers").BitsAndBytesConfig(load_in_4bit=True)
    assert Nf4.of(vars(config)) == Nf4.of({"load_in_4bit": True}) == Nf4(torch.float32, False)
    asked = {"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": True}
    assert Nf4.of(asked) == Nf4(torch.bfloat16, True)


def test_many_tokens_unpack_the_weight_and_few_do_not() -> None:
    assert a_layer(False, lambda layer, x: layer(x), 2000) == [2 * _WEIGHT, 2000 * _OUT * 2]
    assert a_layer(False, lambda layer, x: layer(x), 4) == [4 * _OUT * 2]
    assert a_layer(True, lambda layer, x: layer(x), 2000)[:2] == [4 * _WEIGHT // 64] * 2  # the scales, unpacked too


def test_the_backward_unpacks_it_in_the_dtype_it_was_quantised_from() -> None:
    def work(layer: Any, x: Any) -> None:
        layer.kept = torch.float32
        layer(x).backward(torch.empty(1, 4, _OUT, dtype=torch.bfloat16))

    assert a_layer(False, work, 4)[2:] == [4 * _WEIGHT, 2 * _WEIGHT, 4 * _IN * 2]


@pytest.mark.parametrize("switched_off", [False, True])
def test_an_adapter_is_cast_to_the_result_s_dtype_before_it_is_added(switched_off: bool) -> None:
    """As PEFT's class for 4-bit layers does; its other class adds first, which makes float32 of two half precisions."""
    peft = pytest.importorskip("peft")
    from memprof.simulate.fake_cuda.nf4 import tell_of_adapters

    def work(layer: Any, x: Any) -> None:
        config = peft.LoraConfig(r=16, target_modules=["0"])
        model = peft.inject_adapter_in_model(config, torch.nn.Sequential(layer)).to(torch.float16)
        tell_of_adapters(model)
        model[0].enable_adapters(not switched_off)
        model(x)

    found = a_layer(False, work, 4)
    assert 4 * _OUT * 4 not in found
    # The result, its copy; the product with the second matrix, scaled, cast; the sum.
    assert found.count(4 * _OUT * 2) == (1 if switched_off else 6)


def test_dora_multiplies_the_unpacked_weight(settings_for: Callable[..., Any]) -> None:
    """PEFT copies the layer for its magnitude's first value, and unpacks the weight in every forward."""
    asked = settings_for(
        lora_r=4, lora_target_modules=("up_proj",), load_in_4bit=True, dtype="bfloat16", generation="none",
        gradient_checkpointing=False,
    )  # fmt: skip
    lora, dora = (simulate_settings(asked.with_(use_dora=used), stacks=False) for used in (False, True))
    unpacked, packed = 2 * _HIDDEN * _WIDE, _HIDDEN * _WIDE // 2
    assert sizes(dora).count(unpacked) > sizes(lora).count(unpacked)
    assert sizes(dora).count(packed) == sizes(lora).count(packed) + 2  # one copy in each layer
    assert not [note for note in dora["memprof"]["notes"] if "shortcut" in note]


def test_settings_ask_for_it_as_transformers_is_asked() -> None:
    from memprof.config.settings import Settings
    from memprof.config.to_trl_config import four_bit_arguments
    from memprof.simulate.fake_cuda.nf4 import Nf4

    config = pytest.importorskip("transformers").BitsAndBytesConfig
    plain = Settings("m", lora_r=4, load_in_4bit=True)
    wanted = {
        plain: Nf4(torch.bfloat16, False),
        plain.with_(mixed_precision="no", dtype="float16"): Nf4(torch.float16, False),
        plain.with_(bnb_4bit_use_double_quant=True): Nf4(torch.bfloat16, True),
        plain.with_(bnb_4bit_compute_dtype="float16"): Nf4(torch.float16, False),
    }
    for settings, nf4 in wanted.items():
        assert Nf4.of(vars(config(**four_bit_arguments(settings)))) == nf4


def test_the_settings_decide_what_is_held_and_in_what_products_are_computed(settings_for: Callable[..., Any]) -> None:
    # Rows and tokens enough that every product unpacks its weight.
    asked = settings_for(
        lora_r=4, load_in_4bit=True, dtype="bfloat16", generation="none", prompt_length=200, completion_length=200,
        gradient_checkpointing=False,
    )  # fmt: skip
    raw = {
        name: simulate_settings(asked.with_(**changes), stacks=False)
        for name, changes in {
            "plain": {},
            "double": {"bnb_4bit_use_double_quant": True},
            "float32": {"bnb_4bit_compute_dtype": "float32"},
            "float16": {"bnb_4bit_compute_dtype": "float16"},
        }.items()
    }
    blocks = _HIDDEN * _WIDE // 64
    counts = {name: sizes(found).count(blocks) for name, found in raw.items()}
    assert counts["double"] == counts["plain"] + 6  # a byte a scale: gate, up and down of two layers
    unpacked = {name: sizes(found).count(4 * _HIDDEN * _WIDE) for name, found in raw.items()}
    assert unpacked == {"plain": 0, "double": 0, "float32": 2 * 6, "float16": 0}  # two steps' forward
    inputs = 4 * 400 * _HIDDEN
    # Under autocast each layer's bfloat16 input is copied into the other dtype.
    assert sizes(raw["float16"]).count(2 * inputs) > sizes(raw["plain"]).count(2 * inputs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bnb_4bit_use_double_quant": True}, "need --load-in-4bit"),
        ({"bnb_4bit_compute_dtype": "float16"}, "need --load-in-4bit"),
        ({"lora_r": 4, "load_in_4bit": True, "bnb_4bit_compute_dtype": "int8"}, "choose from auto, float32"),
        ({"lora_dropout": 0.1}, "add --lora-r"),
        ({"lora_r": 4, "lora_dropout": 1.0}, "a share below 1"),
    ],
)
def test_contradictions_are_sentences(changes: dict[str, Any], words: str) -> None:
    from memprof.config.settings import Settings
    from memprof.errors import UsageError

    with pytest.raises(UsageError, match=words):
        Settings("m", **changes)
