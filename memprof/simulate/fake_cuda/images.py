"""Put images into the prompts of a run: what a family's processor makes of them, and what asks for their sizes."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memprof.compat import torch as torch_names
from memprof.compat import trl as trl_names
from memprof.compat.patching import bind
from memprof.config.settings import Settings
from memprof.errors import InputError, UsageError
from memprof.foreign import Kwargs

# Smallest and largest image in pixels where the model's folder has no preprocessor_config.json, as published.
_QWEN_PIXELS = {"qwen2_vl": (56 * 56, 28 * 28 * 16384), "qwen2_5_vl": (56 * 56, 28 * 28 * 16384)}
_UNCHECKED = "TRANSFORMERS_DISABLE_TORCH_CHECK"
_NOT_SIMULATED = "images are simulated for qwen2_vl, qwen2_5_vl and gemma3"


@dataclass(frozen=True)
class Images:
    """What each prompt's images are to a model.

    Attributes:
        number: of a prompt.
        tokens: placeholders of one image in the prompt.
        pixels: shape of what the processor makes of one image.
        token: a placeholder's id.
        types: the field that tells placeholders from text.
        grid: an image's patches in time, height and width, of a family that packs images of any size.
    """

    number: int
    tokens: int
    pixels: tuple[int, ...]
    token: int
    types: str
    grid: tuple[int, int, int] | None = None

    def ids(self, length: int) -> list[int]:
        """Make a prompt: each image after a token of text, then the rest of the text."""
        images = [0, *[self.token] * self.tokens] * self.number
        return images + [0] * (length - len(images))

    def inputs(self, prompts: int, length: int, values: Callable[[Any], Any] = torch.tensor) -> dict[str, Any]:
        """Make what a processor returns beside the ids; ``values`` makes the tensor of the grids."""
        pixels = torch.zeros(prompts * self.number * self.pixels[0], *self.pixels[1:])
        types = [int(token == self.token) for token in self.ids(length)]
        found = {"pixel_values": pixels, self.types: torch.tensor([types] * prompts)}
        if self.grid is not None:
            found["image_grid_thw"] = values([self.grid] * (prompts * self.number))
        return found


def images_of(settings: Settings, config: Any) -> Images | None:
    """Return what the settings' images are to the model of ``config``; None where there are none.

    Raises:
        InputError: the family's images are not simulated.
        UsageError: the prompt has no room for them.
    """
    if not settings.images:
        return None
    kind = config.model_type
    if kind in _QWEN_PIXELS:
        found = _packed(settings, config)
    elif kind == "gemma3":
        vision, tokens = config.vision_config, config.mm_tokens_per_image
        pixels = (1, vision.num_channels, vision.image_size, vision.image_size)
        found = Images(settings.images, tokens, pixels, config.image_token_id, "token_type_ids")
    else:
        raise InputError(f"{settings.model}: {_NOT_SIMULATED}, not for {kind}; record a step of the run instead.")
    needed = found.number * (found.tokens + 1) + 1
    if settings.prompt_length < needed:
        raise UsageError(
            f"--images {found.number} uses {found.tokens:,} tokens per image, which --prompt-length counts too: give "
            f"{needed} or more."
        )
    return found


def _packed(settings: Settings, config: Any) -> Images:
    vision = config.vision_config
    width, height = settings.image_pixels
    side, merge = vision.patch_size, vision.spatial_merge_size
    least, most = _pixel_limits(settings.model, config.model_type)
    width, height = resized(width, height, side * merge, least, most)
    grid = (1, height // side, width // side)
    patches = grid[1] * grid[2]
    values = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * side**2
    return Images(
        settings.images, patches // merge**2, (patches, values), config.image_token_id, "mm_token_type_ids", grid
    )


def resized(width: int, height: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Return the size to which Qwen's processor scales an image: sides of whole ``factor``, pixels within the limits.

    Raises:
        UsageError: the processor refuses so long an image.
    """
    if max(width, height) > 200 * min(width, height):
        raise UsageError(f"--image-size {width}x{height}: Qwen's processor does not support aspect ratios above 200:1.")
    sides = [max(factor, round(side / factor) * factor) for side in (width, height)]
    if sides[0] * sides[1] > most:
        scale = math.sqrt(width * height / most)
        sides = [max(factor, math.floor(side / scale / factor) * factor) for side in (width, height)]
    elif sides[0] * sides[1] < least:
        scale = math.sqrt(least / (width * height))
        sides = [math.ceil(side * scale / factor) * factor for side in (width, height)]
    return sides[0], sides[1]


def _pixel_limits(model: str, kind: str) -> tuple[int, int]:
    """Return the smallest and the largest image a processor makes, in pixels: the folder's own, or as published.

    Raises:
        InputError: the folder's own cannot be read.
    """
    given = Path(model)
    path = (given if given.is_dir() else given.parent) / "preprocessor_config.json"
    least, most = _QWEN_PIXELS[kind]
    if not given.exists() or not path.is_file():
        return least, most
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        size = said.get("size") or {}
        least = int(said.get("min_pixels") or size.get("shortest_edge") or least)
        most = int(said.get("max_pixels") or size.get("longest_edge") or most)
        if not 0 < least <= most:
            raise ValueError(f"images of {least} to {most} pixels")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not the settings of an image processor ({str(error)[:80]}).") from None
    return least, most


def processor_of(images: Images, length: int, tokenizer: Any, values: Callable[[Any], Any] = torch.tensor) -> Any:
    """Make a processor whose every prompt is of ``length`` tokens and has these images."""
    from transformers import ProcessorMixin

    class Processor(ProcessorMixin):  # type: ignore[misc]
        def __init__(self) -> None:
            self.tokenizer = tokenizer
            self.chat_template = None

        def __call__(self, *_: Any, text: Any, **__: Any) -> dict[str, Any]:
            return images.inputs(len(text), length, values)

        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            return "a"

    return Processor()


def put_images(trainer: Any, images: Images, length: int) -> None:
    """Let every prompt of a trainer be of ``length`` tokens and have ``images``."""

    def tokenize(self: Any, prompts: list[Any]) -> Any:
        return [images.ids(length) for _ in prompts], [[None] * images.number for _ in prompts], {}

    bind(trainer, trl_names.TOKENIZE_PROMPTS, tokenize)


def fake_images(trainer: Any, images: Images) -> None:
    """Let a trainer whose prompts have ``images`` compute log-probabilities where tensors have no values."""
    original = trl_names.LOGPS.of(trainer)
    number, patches = images.number, images.pixels[0]

    def logps(
        self: Any, model: Any, input_ids: Any, *given: Any,
        pixel_values: Any = None, image_grid_thw: Any = None, num_images: Any = None, **more: Any,
    ) -> Any:  # fmt: skip
        done = 0

        def with_images(**inputs: Any) -> Any:  # TRL's own slices come from sums of the numbers of images
            nonlocal done
            first, done = done, done + inputs["input_ids"].shape[0]
            inputs["pixel_values"] = pixel_values[first * number * patches : done * number * patches]
            if image_grid_thw is not None:
                inputs["image_grid_thw"] = image_grid_thw[first * number : done * number]
            return model(**inputs)

        return original(with_images, input_ids, *given, **more)

    bind(trainer, trl_names.LOGPS, logps)
    for module in trainer.model.modules():
        if hasattr(module, "get_rope_index"):
            module.get_rope_index = _positions
        if images.grid is not None and hasattr(module, "patch_embed"):
            module.register_forward_pre_hook(_with_places, with_kwargs=True)


def _positions(input_ids: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions in time, height and width, which follow from where images are, and how far text is behind."""
    rows, tokens = input_ids.shape
    return input_ids.new_zeros(3, rows, tokens), input_ids.new_zeros(rows, 1)


def _with_places(module: Any, args: Any, kwargs: Kwargs) -> tuple[Any, dict[str, Any]]:
    """Give a vision tower the places of its patches and its windows, which it would compute from values."""
    from transformers.vision_utils import get_vision_window_index

    pixels, grid = args[0], kwargs["grid_thw"].plain()
    kwargs = {**kwargs, "position_ids": torch.zeros(pixels.shape[0], 2, dtype=torch.long, device=pixels.device)}
    if hasattr(module, "window_size"):
        sizes = (module.spatial_merge_size, module.window_size, module.patch_size)
        with torch_names.NO_MODES.get()():
            index, ends = get_vision_window_index(grid, *sizes)
        kwargs |= {"window_index": HostValues.of(index), "cu_window_seqlens": HostValues.of(ends)}
    return args, kwargs


@contextlib.contextmanager
def shapes_unchecked() -> Iterator[None]:
    """Let no model compare the number of placeholders, which are values, with that of its features, while open."""
    before = os.environ.get(_UNCHECKED)
    os.environ[_UNCHECKED] = "1"
    try:
        yield
    finally:
        os.environ.pop(_UNCHECKED) if before is None else os.environ.update({_UNCHECKED: before})


class HostValues(torch.Tensor):
    """A few integers on the host, beside tensors that have no values: what follows from them alone has values too."""

    @classmethod
    def of(cls, values: Any) -> Any:
        """Make one of numbers or of a tensor that has values."""
        with torch_names.NO_MODES.get()():
            return torch.as_tensor(values).as_subclass(cls)

    def to(self, *_: Any, **__: Any) -> Any:
        return self

    def plain(self) -> torch.Tensor:
        """Return an ordinary tensor with the values."""
        with torch_names.NO_MODES.get()():
            return torch.tensor(self.tolist(), dtype=self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        others: list[torch.device] = []

        def note(one: Any) -> None:
            if isinstance(one, torch.Tensor) and not isinstance(one, cls):
                others.append(one.device)

        def without_values(one: Any) -> Any:
            return torch.zeros(one.shape, dtype=one.dtype, device=others[0]) if isinstance(one, cls) else one

        _each((args, kwargs), note)
        if others:
            return func(*_each(args, without_values), **_each(kwargs, without_values))
        with torch_names.NO_MODES.get()():
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def _each(of: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(of, (list, tuple)):
        return type(of)(_each(one, change) for one in of)
    if isinstance(of, dict):
        return {name: _each(one, change) for name, one in of.items()}
    return change(of)
