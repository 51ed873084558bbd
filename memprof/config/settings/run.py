"""Hold the settings of one GRPO run, named as ``GRPOConfig``, ``LoraConfig`` and friends name them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from memprof.config.optimizers import OPTIMIZERS, optimizer
from memprof.config.settings.parts import (
    DeviceSettings,
    GenerationSettings,
    ModelSettings,
    ShardingSettings,
    TrainerSettings,
    Value,
    flag_of,
)
from memprof.errors import UsageError
from memprof.report.base import Settings as PlainSettings
from memprof.report.run import KnownSettings

#: Defaults of TRL's other trainers where they are not those of :class:`Settings`, for who leaves a setting open.
TRAINERS_OWN: dict[str, dict[str, Value]] = {"rloo": {"beta": 0.05}}
_UNSHARDED = tuple(name for name in OPTIMIZERS if not optimizer(name).sharded)
_LEAN_ONLY = ("max_tokens_per_piece", "tiled_mlp", "generation_batch", "prefix_sharing", "park_weights")


@dataclass(frozen=True)
class Settings(DeviceSettings, ShardingSettings, GenerationSettings, TrainerSettings, ModelSettings):
    """One run: five parts, each of which refuses what it cannot be; here stands what they refuse of each other.

    ``left_out`` names fields that a config file sets and no simulation follows (``trainer_fields.toml``); ``unknown``
    those that no configuration class has; ``assumed`` names the settings whose defaults stand because nobody gave a
    value.
    """

    left_out: tuple[str, ...] = ()
    unknown: tuple[str, ...] = field(default=(), compare=False, repr=False)
    assumed: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def _settle(self) -> None:
        super()._settle()
        object.__setattr__(self, "left_out", tuple(self.left_out))
        object.__setattr__(self, "unknown", tuple(self.unknown))
        object.__setattr__(self, "assumed", tuple(self.assumed))

    def _check(self) -> None:
        super()._check()
        for name in _LEAN_ONLY:
            if not self.lean and (value := getattr(self, name)) is not None and value is not False:
                raise UsageError(f"{flag_of(name)} is of the lean trainer: add --recipe lean.")
        self._check_generation()
        self._check_fp16()
        self._check_sharding()
        self._check_other_adapters()
        self._check_images()
        if self.checkpointing == "offloaded" and self.device == "cpu":
            raise UsageError("--gradient-checkpointing offloaded frees a GPU: drop --device cpu.")
        batch = self.per_device_train_batch_size * self.replicas * self.generation_steps
        if batch % self.num_generations and not self.supervised:
            raise UsageError(
                f"the generation batch ({batch} = per-device batch {self.per_device_train_batch_size} x "
                f"{self.replicas} GPU(s) x {self.generation_steps} steps per generation) is not a multiple of "
                f"--num-generations {self.num_generations}, which TRL requires."
            )

    def _check_generation(self) -> None:
        if self.cache_implementation == "static" and self.weights_dtype == "float32" and self.mixed_precision != "no":
            raise UsageError(
                "--cache-implementation static fails in a real run too with float32 weights under autocast (keys and "
                "values differ in dtype): add --dtype bfloat16."
            )
        if self.park_weights and (self.generation != "vllm" or not self.engine_sleeps):
            raise UsageError(
                "--park-weights is for an engine in sleep mode: add --generation vllm --vllm-enable-sleep-mode."
            )
        if self.park_weights and self.load_in_4bit:
            raise UsageError("--park-weights restores weights that a merged adapter replaces: drop --load-in-4bit.")
        if self.park_weights and self.divided:
            raise UsageError("--park-weights moves whole parameters: drop --sharding, or use --sharding ddp.")
        if self.generation == "vllm" and self.sharding in ("fsdp2", "tp"):
            raise UsageError(
                f"--generation vllm with --sharding {self.sharding} is not simulated yet; use --generation none."
            )
        if self.generation == "vllm" and self.device == "cpu":
            raise UsageError("--generation vllm runs on a GPU; drop --device cpu.")

    def _check_fp16(self) -> None:
        """Refuse what a run with fp16's loss scaler refuses, and what is not simulated with it."""
        if self.mixed_precision != "fp16":
            return
        if self.dtype == "float16" and not self.has_adapter:
            raise UsageError("fp16 over float16 weights fails in a real run too: load them with --dtype float32.")
        if self.divided:
            raise UsageError(f"fp16 with --sharding {self.sharding} is not simulated: set bf16, or drop --sharding.")
        if self.device == "cpu":
            raise UsageError("fp16 scales losses on GPUs only: drop --device cpu, or set bf16.")

    def _check_sharding(self) -> None:
        untorch = self.device == "cpu" or self.optim in _UNSHARDED
        if self.supervised and (self.sharded_by_zero or self.sharding == "tp"):
            where = "on one GPU, with ddp and with fsdp2: use one of these"
            raise UsageError(f"--trainer {self.trainer} is simulated {where}.")
        if self.recipe == "liger" and self.sharding in ("fsdp2", "tp"):
            raise UsageError(f"--recipe liger with --sharding {self.sharding} is not simulated: use ddp, or zero2.")
        if self.sharding == "fsdp2" and untorch:
            raise UsageError("--sharding fsdp2 is simulated on CUDA, with torch's own AdamW: use --optim adamw_torch.")
        if self.sharding == "fsdp2" and self.load_in_4bit:
            raise UsageError("--load-in-4bit with --sharding fsdp2: accelerate leaves such weights whole; use ddp.")
        if self.sharding == "tp" and (untorch or self.has_adapter):
            raise UsageError(
                "--sharding tp is simulated on CUDA for full fine-tuning with torch's own AdamW: drop --lora-r, and "
                "use --optim adamw_torch."
            )
        if self.sharded_by_zero and (untorch or self.load_in_4bit):
            raise UsageError(
                f"--sharding {self.sharding} is modelled on CUDA for bfloat16 weights and torch's own AdamW: use "
                "--optim adamw_torch, and drop --load-in-4bit."
            )

    def _check_other_adapters(self) -> None:
        """Refuse where adapters other than plain LoRA are not simulated."""
        what = (
            f"--peft-type {self.peft_type.lower()}" if self.peft_type != "LORA"
            else "--use-dora" if self.use_dora
            else "--lora-modules-to-save" if self.modules_to_save else None
        )  # fmt: skip
        if what is None:
            return
        if self.divided:
            raise UsageError(f"{what} with --sharding {self.sharding} is not simulated: use --sharding ddp.")
        if self.lean and self.peft_type == "PROMPT_TUNING":
            raise UsageError(f"{what} with --recipe lean is not simulated: drop one of them.")

    def _check_images(self) -> None:
        """Refuse, by name, what is not simulated beside images."""
        if self.images and self.generation != "none":
            raise UsageError("Generation from images is not simulated: add --generation none for the training's peak.")
        if self.images and self.gpus > 1:
            raise UsageError("--images is simulated on one GPU: drop --gpus.")

    @property
    def weights_dtype(self) -> str:
        """Return the parameters' dtype where they are trained: DeepSpeed's are bfloat16."""
        return "bfloat16" if self.sharded_by_zero else self.dtype

    @property
    def engine_sleeps(self) -> bool:
        """Return whether a vLLM engine sleeps while the model trains: by default the lean trainer's does, TRL's not."""
        return self.lean if self.vllm_enable_sleep_mode is None else self.vllm_enable_sleep_mode

    def with_(self, **changes: Any) -> Settings:
        return replace(self, **{"assumed": tuple(n for n in self.assumed if n not in changes), **changes})

    @property
    def known(self) -> KnownSettings:
        """Return what a prediction's error and what is assumed depend on."""
        return KnownSettings.of(self.to_dict())

    def to_dict(self) -> PlainSettings:
        """Return plain data, as it is kept in a snapshot; without options where there are none."""
        plain = asdict(self)
        for name in ("lora_target_modules", "modules_to_save", "left_out", "unknown", "assumed"):
            plain[name] = list(getattr(self, name))
        if self.generation == "vllm":
            plain["vllm_enable_sleep_mode"] = self.engine_sleeps
        for name in ("adapter_options", "trainer_options"):
            options = getattr(self, name)
            plain[name] = options.to_dict()
            if not options:
                del plain[name]
        return plain

    @classmethod
    def from_dict(cls, plain: PlainSettings) -> Settings:
        """Return the settings that :meth:`to_dict` wrote."""
        return cls(**{**plain, "lora_target_modules": tuple(plain["lora_target_modules"])})
