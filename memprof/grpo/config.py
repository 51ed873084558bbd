"""Add the lean trainer's settings to TRL's ``GRPOConfig``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from trl import GRPOConfig

from memprof.errors import UsageError
from memprof.foreign import Kwargs

# Switches that count, and the least they can be.
_COUNTS = {"tiled_mlp": 0, "max_tokens_per_piece": 1, "loss_chunk_tokens": 1, "generation_batch": 1}
_CHOICES = {
    "exact_two_pass": ("auto", "always", "never"),
    "checkpointing": ("auto", "none", "full", "selective", "mlp", "offloaded"),
    "reference": ("auto", "adapter", "host", "device"),
    "weights": ("auto", "as_given", "fp32", "bf16", "nf4"),
    "stochastic_rounding": ("auto", "never"),
    "gradient_sums": ("auto", "fp32", "never"),
    "on_oom": ("auto", "adapt", "raise"),
    "generation": (None, "paged", "generate"),
}


def _setting(default: Any, words: str) -> Any:
    return field(default=default, metadata={"help": words})


@dataclass
class LeanSettings:
    """Add the lean trainers' arguments to one of TRL's configs.

    Each can be switched by itself. None changes the loss or, beyond rounding, its gradients. ``docs/lean-trainer.md``
    says what each saves and costs.
    """

    micro_splitting: bool = _setting(
        True,
        "Forward and backward in chunks of a few sequences each, without padding, instead of the whole "
        "micro-batch in one graph.",
    )
    max_tokens_per_piece: int | None = _setting(
        None,
        "Maximum number of tokens per forward pass; a longer sequence runs alone. None: as many as fit in "
        "1/64 of the weights' bytes or 32 MiB, whichever is more, 2048 at most. 1: sequences go one by one.",
    )
    exact_two_pass: str = _setting(
        "auto",
        "A first forward of every chunk without a graph, for losses that do not separate by sequence. "
        "'auto': if the loss needs it (entropy quantile); 'always'; 'never': such losses raise an error.",
    )
    loss_chunk_tokens: int | None = _setting(
        None,
        "Tokens whose logits exist at a time. None: as many as fit in fp32 in 256 MiB, or in less for a small "
        "model with short completions (1/128 of the weights' bytes, or 96 KiB per completion token if that is more).",
    )
    checkpointing: str = _setting(
        "auto",
        "'none'; 'full': keep each layer's input; 'selective': also keep attention's output; 'mlp': "
        "recompute all but attention; 'offloaded': full, inputs in pinned host memory. 'auto': transformers' own, "
        "as gradient_checkpointing says (on, TRL's default: each layer's input is kept), with MLPs in tiles if "
        "long; on CUDA 'offloaded' where a completion of full length would keep 2 GiB or more.",
    )
    tiled_mlp: int | None = _setting(
        None,
        "Tokens that go through an MLP together. None: under checkpointing='auto', where layers are "
        "checkpointed and completions can be longer, 4096; else, and for 0, the MLP is not tiled.",
    )
    prefix_sharing: bool = _setting(
        False, "The prompt of a group goes through the model once for all its completions, exactly."
    )
    packing: bool = _setting(
        False, "Concatenate the sequences of a piece into one row instead of padding them."
    )
    generation: str | None = _setting(
        None,
        "How to generate sequences whose KV cache doesn't fit: 'paged' (a rolling batch over a pool of "
        "bounded size) or 'generate' (transformers' generate in passes). None: paged where the model and the "
        "sampling settings allow it. 'paged' is used even where all have room.",
    )
    generation_batch: int | None = _setting(
        None,
        "Number of full-length sequences whose KV cache generation may use; the size of a pass. None: as many as "
        "the GPU has room for; elsewhere all.",
    )
    reference: str = _setting(
        "auto",
        "Location of the reference policy: 'adapter' (the adapter off or switched), 'host' (in host memory, "
        "streamed layer by layer), 'device' (a copy on the GPU, as TRL). 'auto': adapter with PEFT, else host.",
    )
    weights: str = _setting(
        "auto",
        "Weights of a model given as a string: 'fp32', 'bf16', 'nf4' (needs bitsandbytes), 'as_given' "
        "(model_init_kwargs decides). 'auto': bf16 under an adapter if bf16 is on, else TRL's default, fp32.",
    )
    stochastic_rounding: str = _setting(
        "auto",
        "'auto': where bf16 weights are trained by torch's AdamW or torchao's low-bit ones, so that small "
        "updates are not lost; 'never'.",
    )
    gradient_sums: str = _setting(
        "auto",
        "'fp32': gradients of bf16 weights are added up over three or more pieces in fp32, for 4 bytes a "
        "trained parameter instead of 2 while pieces run. 'auto': where that takes at most 1/16 of the weights' "
        "bytes (adapters). 'never': in bf16.",
    )
    on_oom: str = _setting(
        "auto",
        "Where memory runs out in a piece, a generation or the optimizer's first step: 'adapt' (go on "
        "smaller, with the gradient and tokens there would have been), 'raise'. 'auto': adapt on CUDA, but not "
        "under FSDP, DeepSpeed and re-entrant checkpointing.",
    )
    memory_budget: str | None = _setting(
        None,
        "'24GB' or 'auto' (the GPU's memory): the fastest settings that fit are found by simulation, among "
        "checkpointing, max_tokens_per_piece, tiled_mlp and generation_batch where they are not set.",
    )
    memory_budget_executor: str | None = _setting(
        None,
        "Where memory_budget simulates: 'local' or None (processes of this machine), 'dask:ADDRESS', "
        "'ray', 'ray:ADDRESS'.",
    )
    park_weights: bool = _setting(
        False,
        "Move weights and optimizer state to pinned host memory while a colocated vLLM generates, for a "
        "GPU that is too small for both. Costs two copies of each over PCIe per generation, and as much host memory.",
    )
    vllm_enable_sleep_mode: bool = _setting(
        True, "Let a colocated vLLM give its memory back while training (TRL's default: no)."
    )

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(f"{name} is one of {', '.join(map(str, allowed))}: got {value!r}.")
        for name in (own.name for own in fields(LeanSettings) if own.type == "bool"):
            if type(getattr(self, name)) is not bool:
                raise UsageError(f"{name} is True or False: got {getattr(self, name)!r}.")
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                zero = ", or 0 for off" if not least else ""
                raise UsageError(f"{name} is a whole number of at least {max(1, least)}{zero}: got {value!r}.")
        super().__post_init__()  # type: ignore[misc]

    @classmethod
    def of(cls, args: Any, output_dir: str) -> Any:
        """Return ``args`` itself, with the lean defaults added where it is TRL's plain config; all defaults for None;
        UsageError for a config of another trainer, which lacks what this one reads."""
        if args is None:
            return cls(output_dir=output_dir)  # type: ignore[call-arg]
        theirs = next(base for base in cls.__mro__ if base.__module__.startswith("trl."))
        lacking = [f.name for f in fields(theirs) if not hasattr(args, f.name)]
        if lacking:
            raise UsageError(
                f"args is of type {type(args).__name__}, which has no {lacking[0]}: "
                f"use {theirs.__name__} or {cls.__name__}."
            )
        constants = [name for name in vars(cls) if not name.startswith("_")]
        for name in (*(own.name for own in fields(cls)), *constants):
            if not hasattr(args, name):
                setattr(args, name, getattr(cls, name))
        return args

    def lean_settings(self) -> Kwargs:
        """Return the settings this class adds, by name."""
        theirs = {f.name for base in type(self).__mro__ if base.__module__.startswith("trl.") for f in fields(base)}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in theirs}


@dataclass
class LeanGRPOConfig(LeanSettings, GRPOConfig):
    """Arguments of :class:`~memprof.grpo.LeanGRPOTrainer`: all of ``GRPOConfig``'s, and :class:`LeanSettings`."""
