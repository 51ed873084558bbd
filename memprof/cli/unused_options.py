"""Refuse options that change nothing in the run they are given for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.config.settings import Settings


class _Rule(NamedTuple):
    """State when settings count: ``used(settings, value)``, by the setting ``decided_by``; else say ``why`` not."""

    names: tuple[str, ...]
    decided_by: str
    used: Callable[[Settings, Any], bool]
    why: str


_ENGINE = ("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode")
_GENERATED = (
    "num_generations", "steps_per_generation", "num_iterations", "generation", "cache_implementation", "cache_dtype",
    *_ENGINE,
)  # fmt: skip
_ROWS = "--max-length alone sets the length of the rows of --trainer {trainer} are"
_RULES = (
    _Rule(_GENERATED, "trainer", lambda s, _: not s.supervised, "--trainer {trainer} generates nothing"),
    _Rule(("beta",), "trainer", lambda s, _: s.trainer != "sft", "--trainer sft has no KL term"),
    _Rule(("completion_length",), "max_length", lambda s, _: s.max_length is None, _ROWS),
    _Rule(("prompt_length",), "max_length", lambda s, _: s.max_length is None or s.trainer != "sft", _ROWS),
    _Rule(
        ("prompt_length",), "max_length", lambda s, value: s.max_length is None or value == s.prompt_length,
        "a prompt as long as --max-length leaves no tokens for an answer",
    ),
    _Rule(("image_size",), "images", lambda s, _: bool(s.images), "no prompt has images; add --images"),
    _Rule(("lora_target_modules",), "lora_r", lambda s, _: s.has_adapter, "no adapter is trained; add --lora-r"),
    _Rule(
        ("trl_version",), "recipe", lambda s, _: s.recipe.startswith("trl"),
        "the loss is not one of TRL's; drop it, or --recipe",
    ),
    _Rule(_ENGINE, "generation", lambda s, _: s.generation == "vllm", "vLLM does not run; add --generation vllm"),
    _Rule(
        ("generation_batch",), "generation", lambda s, _: s.generation == "hf",
        "transformers generates nothing with --generation {generation}",
    ),
    _Rule(
        ("reduce_bucket_size",), "sharding", lambda s, _: s.sharded_by_zero,
        "the buckets are ZeRO's; add --gpus 8 --sharding zero2",
    ),
    _Rule(("alloc_conf",), "device", lambda s, _: s.device == "cuda", "--device cpu has no CUDA allocator"),
    _Rule(("attn",), "device", lambda s, _: s.device == "cuda", "the kernels are CUDA's, and --device cpu has none"),
)  # fmt: skip
# Giving these says what happens anyway.
_NOTHING_ASKED = ("none", "dynamic", "auto", "")


def refuse_unused(settings: Settings, given: Mapping[str, Any], open_names: Collection[str] = ()) -> None:
    """Refuse (UsageError) an option of ``given``, by the settings' names, that changes nothing in a run of these
    settings.

    ``open_names``: settings that the command varies itself, which decide nothing yet.
    """
    for rule in _RULES:
        for name in rule.names:
            value = given.get(name)
            asked = value is not None and value is not False and value != 0 and value not in _NOTHING_ASKED
            if asked and rule.decided_by not in open_names and not rule.used(settings, value):
                why = rule.why.format(trainer=settings.trainer, generation=settings.generation)
                raise UsageError(f"{_written(name, value)} changes nothing here: {why}.")


def _written(name: str, value: Any) -> str:
    option = f"--{name.replace('_', '-')}"
    return option if value is True else f"{option} {','.join(value) if isinstance(value, tuple) else value}"
