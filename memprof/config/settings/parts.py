"""Hold a run's settings in five parts, each of which refuses what it cannot be, named as TRL and friends name them.

A function that reads one part asks for that part; :class:`~memprof.config.settings.run.Settings` is all five.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeAlias

from memprof.config.optimizers import OPTIMIZERS, why_not_simulated
from memprof.config.trainer_fields import ADAPTER_CLASSES, NO_ARGUMENTS, Arguments
from memprof.config.trl_arguments import recipe_of_release
from memprof.errors import UsageError, did_you_mean
from memprof.units import parse_size

#: The value of a setting.
Value: TypeAlias = "str | int | float | bool | tuple[str, ...] | Arguments | None"

CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("float32", "bfloat16", "float16"),
    "mixed_precision": ("no", "bf16", "fp16"),
    "attn": ("auto", "flash", "efficient", "math"),
    "padding": ("none", "worst"),
    "generation": ("hf", "none", "vllm"),
    "peft_type": tuple(ADAPTER_CLASSES),
    "trainer": ("grpo", "rloo", "sft", "dpo"),
    "recipe": ("trl", "trl-full-logits", "trl-in-place-logits", "trl-0.14", "liger", "lean"),
    "sharding": ("ddp", "fsdp2", "zero1", "zero2", "zero3", "tp"),
    "device": ("cuda", "cpu"),
    "gradient_checkpointing": ("none", "auto", "full", "selective", "offloaded"),
    "cache_implementation": ("dynamic", "static", "quantized"),
    "cache_dtype": ("auto", "fp8", "int4", "int2"),
    "bnb_4bit_compute_dtype": ("auto", "float32", "bfloat16", "float16"),
}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
# What else people and libraries call the choices of a setting.
_OTHER_WORDS = {
    "dtype": _DTYPES,
    "bnb_4bit_compute_dtype": _DTYPES,
    "attn": {
        "sdpa": "auto", "eager": "math", "flash_attention_2": "flash", "flash_attention_3": "flash",
        "flash_attention": "flash", "flash2": "flash",
    },
}  # fmt: skip
# Values that are settings of their own, or not simulated.
_INSTEAD = {
    "dtype": {
        **dict.fromkeys(("int4", "nf4", "fp4", "4bit"), "4-bit weights are given by --load-in-4bit --lora-r 16"),
        **dict.fromkeys(("int8", "fp8", "8bit", "float8"), "8-bit weights are not simulated"),
    },
    "generation": {"sglang": "SGLang runs in processes of its own, which is --generation none"},
    "sharding": {
        "pp": "pipeline parallelism is not simulated",
        "ep": "expert parallelism is not simulated",
        **dict.fromkeys(("megatron", "cp", "sp"), "Megatron's and sequence parallelism are not simulated"),
    },
}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a word"}


@dataclass(frozen=True)
class SettingsPart:
    """Settings that are checked when they are made: each value by itself, then what they say together."""

    def __post_init__(self) -> None:
        part: Any = type(self)
        self._use_own_words()
        for name, kinds in kinds_of(part).items():
            value, allowed = getattr(self, name), CHOICES.get(name)
            if not any(_is_a(value, kind) for kind in kinds):
                raise UsageError(f"{flag_of(name)} {value!r}: give {_KINDS[kinds[0]]}.")
            if allowed and isinstance(value, str) and value not in allowed and value.upper() not in allowed:
                instead = _INSTEAD.get(name, {}).get(value.lower())
                meant = f": {instead}; else" if instead else f"{did_you_mean(value, allowed)}:"
                raise UsageError(f"{flag_of(name)} {value!r}{meant} choose from {', '.join(allowed)}.")
        self._settle()
        self._check()

    def _use_own_words(self) -> None:
        """Replace other words for a choice, such as bf16, by its own."""
        for name, words in _OTHER_WORDS.items():
            if isinstance(value := getattr(self, name, None), str):
                value = value.removeprefix("torch.")
                object.__setattr__(self, name, words.get(value.lower(), value))

    def _settle(self) -> None:
        """Give what can be written in several ways one form."""

    def _check(self) -> None:
        """Refuse, in a sentence, what the values say together."""

    def _at_least_one(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{flag_of(name)} must be at least 1.")


@dataclass(frozen=True)
class ModelSettings(SettingsPart):
    """The policy's weights, its adapter and its attention.

    ``dtype`` is the parameters': TRL loads a model given by name in float32. ``bnb_4bit_compute_dtype`` ``auto`` is
    autocast's dtype, or the weights'. ``peft_type`` is PEFT's name of the adapter, LoRA where ``lora_r`` is given;
    ``modules_to_save`` are trained whole beside it. ``adapter_options`` are further arguments of its configuration.
    """

    model: str
    dtype: str = "float32"
    peft_type: str = "LORA"
    lora_r: int | None = None
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    lora_dropout: float = 0.0
    use_dora: bool = False
    modules_to_save: tuple[str, ...] = ()
    num_virtual_tokens: int | None = None
    adapter_options: Arguments = NO_ARGUMENTS
    load_in_4bit: bool = False
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str = "auto"
    attn: str = "auto"

    @property
    def has_adapter(self) -> bool:
        """Tell whether an adapter is trained, of any kind, and not the whole model."""
        return self.lora_r is not None or self.peft_type != "LORA"

    def _settle(self) -> None:
        super()._settle()
        object.__setattr__(self, "peft_type", str(self.peft_type).upper())
        object.__setattr__(self, "modules_to_save", tuple(self.modules_to_save))
        options: object = self.adapter_options
        if isinstance(options, Mapping):  # as a snapshot keeps them
            object.__setattr__(self, "adapter_options", Arguments.of(options))

    def _check(self) -> None:
        super()._check()
        self._at_least_one("lora_r", "num_virtual_tokens")
        if not 0 <= self.lora_dropout < 1 or (self.lora_dropout and self.lora_r is None):
            raise UsageError("--lora-dropout is a share below 1, of an adapter's inputs: add --lora-r 16.")
        self._check_adapter()
        if self.load_in_4bit and not self.has_adapter:
            raise UsageError("--load-in-4bit needs an adapter to train: add --lora-r 16.")
        if not self.load_in_4bit and (self.bnb_4bit_use_double_quant or self.bnb_4bit_compute_dtype != "auto"):
            raise UsageError("--bnb-4bit-use-double-quant and --bnb-4bit-compute-dtype need --load-in-4bit.")

    def _check_adapter(self) -> None:
        """Refuse what a kind of adapter does not have, and what is not simulated with it."""
        kind = self.peft_type
        if kind != "LORA" and self.lora_r is not None:
            raise UsageError(f"--lora-r is the rank of LoRA: drop it, or --peft-type {kind}.")
        if self.use_dora and self.lora_r is None:
            raise UsageError("--use-dora is a kind of LoRA: add --lora-r 16.")
        if kind == "IA3" and self.load_in_4bit:
            raise UsageError("--peft-type ia3 with --load-in-4bit is not simulated: drop one of them.")
        if self.modules_to_save and (not self.has_adapter or kind == "PROMPT_TUNING"):
            raise UsageError("--lora-modules-to-save requires LoRA or IA3: add --lora-r 16.")
        if (self.num_virtual_tokens is not None) != (kind == "PROMPT_TUNING"):
            raise UsageError("--peft-type prompt_tuning and --num-virtual-tokens N belong together: give both.")
        if self.adapter_options and not self.has_adapter:
            names = ", ".join(self.adapter_options.to_dict())
            raise UsageError(f"{names} changes nothing here: no adapter is trained; add --lora-r 16.")


@dataclass(frozen=True)
class TrainerSettings(SettingsPart):
    """The trainer, its rows and its loss. Lengths are tokens, one sequence's.

    ``trainer`` is ``grpo`` or ``rloo``; or ``sft`` or ``dpo``, which generate nothing: ``per_device_train_batch_size``
    then counts rows, or pairs of a chosen and a rejected row, of ``max_length`` tokens each where that is given.
    Otherwise it counts completions, as TRL does since 0.16. ``mixed_precision`` is ``bf16``, ``fp16`` or ``no``.
    ``gradient_checkpointing`` is False (``none``), True (``full``), ``selective`` or ``offloaded``; the lean trainer's
    True is ``auto``, its default, and ``full`` a kind of its own. ``trl_version`` chooses the recipe of a release's
    loss; ``trainer_options`` are further arguments of the trainer's configuration.
    """

    trainer: str = "grpo"
    recipe: str = "trl"
    trl_version: str | None = None
    mixed_precision: str = "bf16"
    max_length: int | None = None
    prompt_length: int = 512
    completion_length: int = 256
    images: int = 0
    image_size: str = "1024x1024"
    padding: str = "none"
    num_generations: int = 8
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    steps_per_generation: int | None = None
    num_iterations: int = 1
    gradient_checkpointing: bool | str = True
    beta: float = 0.0
    loss_type: str = "dapo"
    optim: str = "adamw_torch_fused"
    max_grad_norm: float | None = 1.0
    reward_model: str | None = None
    max_tokens_per_piece: int | None = None
    tiled_mlp: int | None = None
    prefix_sharing: bool = False
    trainer_options: Arguments = NO_ARGUMENTS

    def _settle(self) -> None:
        super()._settle()
        options: object = self.trainer_options
        if isinstance(options, Mapping):  # as a snapshot keeps them
            object.__setattr__(self, "trainer_options", Arguments.of(options))
        if self.trl_version is not None and self.recipe == "trl" and not self.supervised:
            object.__setattr__(self, "recipe", recipe_of_release(str(self.trl_version), self.trainer))
        if (kind := self.gradient_checkpointing) == "none":
            kind = False
        elif self.lean:
            kind = "auto" if kind is True else kind
        elif kind in ("auto", "full"):
            kind = True
        object.__setattr__(self, "gradient_checkpointing", kind)
        if self.max_length is not None:
            prompt = self.prompt_length if self.prompt_length < self.max_length else self.max_length // 2
            object.__setattr__(self, "prompt_length", prompt)
            object.__setattr__(self, "completion_length", self.max_length - prompt)

    def _check(self) -> None:
        super()._check()
        self._check_kind()
        self._at_least_one(
            "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "prompt_length",
            "completion_length", "num_iterations", "max_tokens_per_piece",
        )  # fmt: skip
        if self.tiled_mlp is not None and self.tiled_mlp < 0:  # 0 tokens: no tiles, however long sequences are
            raise UsageError("--tiled-mlp must be at least 1.")
        if self.max_grad_norm is None:
            raise UsageError("max_grad_norm None ends in a TypeError of transformers' trainer: give 0 to clip nothing.")
        if self.optim not in OPTIMIZERS:
            near = did_you_mean("adamw_torch" if self.optim.lower() in ("adam", "adamw") else self.optim, OPTIMIZERS)
            why = why_not_simulated(self.optim)
            asked = f"--optim {self.optim!r}" + (f" is not simulated: {why}" if why else f"{near} cannot be simulated")
            raise UsageError(f"{asked}; choose from {', '.join(OPTIMIZERS)}.")
        if self.images:
            self._check_image_step()
        if self.num_generations < 2 and not self.supervised:
            raise UsageError("--num-generations must be at least 2: its trainer compares completions of one prompt.")

    def _check_kind(self) -> None:
        if self.trainer == "rloo" and self.recipe in ("liger", "trl-0.14"):
            raise UsageError(f"--recipe {self.recipe} is a loss of GRPO's: drop it, or --trainer rloo.")
        if (release := self.trl_version) is not None and self.recipe.startswith("trl"):
            if self.supervised:
                raise UsageError(f"--trl-version is for GRPO and RLOO: drop it, or --trainer {self.trainer}.")
            if self.recipe != recipe_of_release(release, self.trainer):
                raise UsageError(f"--trl-version {release} and --recipe {self.recipe} differ: give one of them.")
        if self.max_length is not None and not self.supervised:
            raise UsageError("--max-length is of --trainer sft and dpo: others have --prompt-length and more.")
        full = self.trainer == "sft" and self.recipe == "trl-full-logits"
        if self.supervised and ((self.recipe != "trl" and not full) or self.reward_model is not None):
            raise UsageError(
                f"--trainer {self.trainer} is TRL's own: drop --recipe (sft also supports trl-full-logits) and "
                "--reward-model."
            )
        if self.max_length is not None and self.max_length < 2:
            raise UsageError("--max-length must be at least 2.")

    def _check_image_step(self) -> None:
        width, height = self.image_pixels
        if self.images < 0 or not width or not height:
            raise UsageError("--images counts a prompt's images, and --image-size is their WIDTHxHEIGHT: above 0.")
        if self.trainer != "grpo" or self.recipe != "trl":
            raise UsageError(
                "--images is simulated for TRL's GRPO step: drop --trainer and --recipe (the lean trainer uses TRL's "
                "step for images)."
            )

    @property
    def image_pixels(self) -> tuple[int, int]:
        """Return an image's width and height."""
        width, by, height = self.image_size.lower().partition("x")
        if not (by and width.isdecimal() and height.isdecimal()):
            raise UsageError(f"--image-size {self.image_size!r} is not WIDTHxHEIGHT in pixels, such as 1024x768.")
        return int(width), int(height)

    @property
    def lean(self) -> bool:
        """Tell whether the run is memprof's own trainer's."""
        return self.recipe == "lean"

    @property
    def supervised(self) -> bool:
        """Tell whether the rows are given, and nothing is generated."""
        return self.trainer in ("sft", "dpo")

    @property
    def generation_steps(self) -> int:
        """Count the micro-batches that share one generation; TRL's default is the accumulation's."""
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def checkpointing(self) -> str:
        """Return ``none``, ``full``, ``selective`` or ``offloaded``; of the lean trainer also ``auto``."""
        kind = self.gradient_checkpointing
        return kind if isinstance(kind, str) else "full" if kind else "none"

    @property
    def sequence_length(self) -> int:
        """Count the tokens of a prompt and its completion."""
        return self.prompt_length + self.completion_length


@dataclass(frozen=True)
class GenerationSettings(SettingsPart):
    """What generates completions, its cache, and what makes room for it.

    ``vllm_enable_sleep_mode``: None is the trainer's own default (:attr:`Settings.engine_sleeps`).
    """

    generation: str = "hf"
    cache_implementation: str = "dynamic"
    cache_dtype: str = "auto"
    vllm_gpu_memory_utilization: float = 0.3
    vllm_enable_sleep_mode: bool | None = None
    generation_batch: int | None = None
    park_weights: bool = False

    def _check(self) -> None:
        super()._check()
        self._at_least_one("generation_batch")
        if not 0 < self.vllm_gpu_memory_utilization <= 1:
            raise UsageError("--vllm-gpu-memory-utilization is a fraction of the GPU's memory: above 0, at most 1.")
        if self.cache_implementation != "dynamic" and self.generation != "hf":
            raise UsageError("--cache-implementation is of transformers' own generation: drop it or --generation.")
        if self.cache_dtype != "auto" and self.cache_implementation != "quantized":
            raise UsageError("--cache-dtype requires --cache-implementation quantized.")


@dataclass(frozen=True)
class ShardingSettings(SettingsPart):
    """How many GPUs train, and how they divide the run.

    The ``stage3_`` limits and ``reduce_bucket_size`` are DeepSpeed's, in elements, with its own defaults.
    """

    gpus: int = 1
    gpus_per_node: int = 8
    sharding: str = "ddp"
    reduce_bucket_size: int = 500_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000

    def _check(self) -> None:
        super()._check()
        self._at_least_one("gpus", "gpus_per_node")
        if self.gpus == 1 and self.divided:
            raise UsageError(f"--sharding {self.sharding} divides a run among several GPUs: add --gpus 2, or more.")

    @property
    def divided(self) -> bool:
        """Tell whether ranks share out weights or what belongs to them; DDP's each hold everything."""
        return self.sharding != "ddp"

    @property
    def sharded_by_zero(self) -> bool:
        """Tell whether DeepSpeed's ZeRO divides the run."""
        return self.sharding.startswith("zero")

    @property
    def whole_nowhere(self) -> bool:
        """Tell whether parameters are divided before a rank ever holds a whole model."""
        return self.sharding in ("fsdp2", "zero3", "tp")

    @property
    def replicas(self) -> int:
        """Count the ranks with completions of their own; those of a tensor-parallel group share theirs."""
        return 1 if self.sharding == "tp" else self.gpus


@dataclass(frozen=True)
class DeviceSettings(SettingsPart):
    """The card and its host. ``host_memory`` is a node's, such as ``256GB``."""

    device: str = "cuda"
    gpu: str | None = None
    alloc_conf: str = ""
    host_memory: str | None = None

    def _check(self) -> None:
        super()._check()
        if self.host_memory is not None:
            parse_size(self.host_memory)  # which refuses what is no size


def flag_of(name: str) -> str:
    """Return the command line's word for a setting."""
    return f"--{name.replace('_', '-')}"


@cache
def kinds_of(part: type[Any]) -> dict[str, tuple[str, ...]]:
    """Return the kinds of value that each setting of a part takes, the first one of four; lists are left out."""
    said = {f.name: tuple(str(f.type).split(" | ")) for f in fields(part)}
    return {name: kinds for name, kinds in said.items() if kinds[0] in _KINDS}


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or kind == "bool":
        return isinstance(value, bool) and kind == "bool"
    if kind == "None":
        return value is None
    return isinstance(value, (int, float) if kind == "float" else int if kind == "int" else str)
