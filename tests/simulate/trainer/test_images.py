"""GRPO steps with images: a real TRL step on the CPU and its simulation, sizes of images, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memprof.config.settings import Settings
from memprof.errors import InputError, UsageError
from tests.simulate.trainer.vision_models import written


@pytest.mark.trl
@pytest.mark.slow
@pytest.mark.usefixtures("only_new_tensors")
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param("qwen2_vl", {}, marks=pytest.mark.heavy),  # tests/cuda has it, to the byte
        pytest.param(
            "qwen2_5_vl", {"gradient_checkpointing": False, "gradient_accumulation_steps": 2}, marks=pytest.mark.heavy
        ),
        ("qwen2_5_vl", {"lora_r": 3, "beta": 0.1}),
        pytest.param("gemma3", {}, marks=pytest.mark.heavy),
        pytest.param("gemma3", {"lora_r": 3, "num_iterations": 2}, marks=pytest.mark.heavy),
    ],
)
def test_a_step_with_images_holds_what_trls_does(
    kind: str, changes: dict[str, Any], settings_for: Callable[..., Any], tmp_path: Path
) -> None:
    from benchmarks.simulator.real_step import compare, run_real
    from memprof.simulate.run import simulate_settings

    settings = settings_for(
        model=written(kind, tmp_path / "m"), images=2, image_size="40x24", prompt_length=64, device="cpu",
        generation="none", **changes,
    )  # fmt: skip
    found = compare(simulate_settings(settings, stacks=False), run_real(settings, str(tmp_path)))
    assert {"forward", "backward", "optimizer_step"} <= {row["phase"] for row in found["training"]}
    for row in found["training"]:
        mine, theirs = row["peak_bytes"]
        assert mine == pytest.approx(theirs, rel=0.002), row


@pytest.mark.parametrize(
    ("size", "limits", "expected"),
    [
        ((1024, 1024), (3136, 12845056), (1036, 1036)),
        ((640, 480), (3136, 12845056), (644, 476)),
        ((20, 20), (3136, 12845056), (56, 56)),
        ((4000, 3000), (3136, 1003520), (1148, 840)),
    ],
)
def test_an_image_is_scaled_as_qwens_processor_scales_it(
    size: tuple[int, int], limits: tuple[int, int], expected: tuple[int, int]
) -> None:
    from memprof.simulate.fake_cuda.images import resized

    assert resized(*size, 28, *limits) == expected


def test_the_prompt_must_have_room_for_its_images(tmp_path: Path) -> None:
    from transformers import AutoConfig

    from memprof.simulate.fake_cuda.images import images_of

    model = written("qwen2_5_vl", tmp_path)
    config = AutoConfig.from_pretrained(model)
    given: dict[str, Any] = {"model": model, "images": 2, "generation": "none", "image_size": "40x24"}
    found = images_of(Settings(**given, prompt_length=64), config)
    assert found is not None
    assert (found.grid, found.tokens, found.pixels) == ((1, 6, 10), 15, (60, 96))
    assert found.ids(40).count(50) == 30
    with pytest.raises(UsageError, match="uses 15 tokens per image, which --prompt-length counts too: give 33 or more"):
        images_of(Settings(**given, prompt_length=32), config)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"size": [1]}', '{"min_pixels": "few"}', '{"min_pixels": -4}', '{"max_pixels": 9}']
)
def test_a_processors_settings_that_cannot_be_used_are_named(text: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    from memprof.simulate.fake_cuda.images import images_of

    model = written("qwen2_vl", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(text)
    settings = Settings(model=model, images=1, generation="none", image_size="40x24")
    with pytest.raises(InputError, match=r"preprocessor_config\.json: not the settings of an image processor"):
        images_of(settings, AutoConfig.from_pretrained(model))


def test_a_family_whose_images_are_not_simulated_is_named(tiny: str) -> None:
    from transformers import AutoConfig

    from memprof.simulate.fake_cuda.images import images_of

    with pytest.raises(InputError, match="images are simulated for qwen2_vl, qwen2_5_vl and gemma3, not for llama"):
        images_of(Settings(model=tiny, images=1, generation="none"), AutoConfig.from_pretrained(tiny))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "Generation from images is not simulated: add --generation none"),
        ({"generation": "none", "recipe": "lean"}, "the lean trainer uses TRL's step for images"),
        ({"generation": "none", "image_size": "big"}, "is not WIDTHxHEIGHT in pixels"),
        ({"generation": "none", "image_size": "0x9"}, "above 0"),
        ({"generation": "none", "gpus": 2}, "on one GPU"),
    ],
)
def test_what_is_not_simulated_beside_images_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Settings(model="m", images=1, **changes)
