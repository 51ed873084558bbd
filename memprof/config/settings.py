"""Hold the settings of one GRPO run, named as ``GRPOConfig``, ``LoraConfig`` and friends name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from memprof.config.optimizers import OPTIMIZERS, optimizer
from memprof.config.parts import (
    CHOICES,
    DeviceSettings,
    GenerationSettings,
    ModelSettings,
    ShardingSettings,
    TrainerSettings,
    flag_of,
    kinds_of,
)
from memprof.config.trl_arguments import left_out_of, said_by_trl
from memprof.errors import InputError, UsageError
from memprof.files import refuse_special

__all__ = ["CHOICES", "TRAINERS_OWN", "Settings", "read_settings"]

#: Defaults of TRL's other trainers where they are not those of :class:`Settings`, for who leaves a setting open.
TRAINERS_OWN: dict[str, dict[str, Any]] = {"rloo": {"beta": 0.05}}
_UNSHARDED = tuple(name for name in OPTIMIZERS if not optimizer(name).sharded)
_LEAN_ONLY = ("max_tokens_per_piece", "tiled_mlp", "generation_batch", "prefix_sharing", "park_weights")


@dataclass(frozen=True)
class Settings(DeviceSettings, ShardingSettings, GenerationSettings, TrainerSettings, ModelSettings):
    """One run: five parts, each of which refuses what it cannot be; here stands what they refuse of each other.

    ``left_out`` names what a config file switches on and no simulation executes; ``assumed`` names the settings whose
    defaults stand because nobody gave a value.
    """

    left_out: tuple[str, ...] = ()
    assumed: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def _settle(self) -> None:
        super()._settle()
        object.__setattr__(self, "left_out", tuple(self.left_out))
        object.__setattr__(self, "assumed", tuple(self.assumed))

    def _check(self) -> None:
        super()._check()
        for name in _LEAN_ONLY:
            if not self.lean and (value := getattr(self, name)) is not None and value is not False:
                raise UsageError(f"{flag_of(name)} is of the lean trainer: add --recipe lean.")
        self._check_generation()
        self._check_fp16()
        self._check_sharding()
        if self.checkpointing == "offloaded" and self.device == "cpu":
            raise UsageError("--gradient-checkpointing offloaded frees a GPU: drop --device cpu.")
        batch = self.per_device_train_batch_size * self.replicas * self.generation_steps
        if batch % self.num_generations and not self.supervised:
            raise UsageError(
                f"the generation batch ({batch} = per-device batch {self.per_device_train_batch_size} x "
                f"{self.replicas} GPU(s) x {self.generation_steps} steps per generation) is not a multiple of "
                f"--num-generations {self.num_generations}, which TRL refuses."
            )

    def _check_generation(self) -> None:
        if self.cache_implementation == "static" and self.weights_dtype == "float32" and self.mixed_precision != "no":
            raise UsageError(
                "--cache-implementation static fails in a real run too with float32 weights under autocast (keys and "
                "values differ in dtype): add --dtype bfloat16."
            )
        if self.park_weights and (self.generation != "vllm" or not self.vllm_enable_sleep_mode):
            raise UsageError(
                "--park-weights makes room for an engine that sleeps: add --generation vllm --vllm-enable-sleep-mode."
            )
        if self.park_weights and self.divided:
            raise UsageError("--park-weights moves whole parameters: drop --sharding, or use --sharding ddp.")
        if self.generation == "vllm" and self.sharding in ("fsdp2", "tp"):
            raise UsageError(
                f"--generation vllm beside --sharding {self.sharding} is not simulated yet; use --generation none."
            )
        if self.generation == "vllm" and self.device == "cpu":
            raise UsageError("--generation vllm runs on a GPU; drop --device cpu.")

    def _check_fp16(self) -> None:
        """Refuse what a run with fp16's loss scaler refuses, and what is not simulated with it."""
        if self.mixed_precision != "fp16":
            return
        if self.dtype == "float16" and self.lora_r is None:
            raise UsageError("fp16 over float16 weights fails in a real run too: load them with --dtype float32.")
        if self.divided:
            raise UsageError(f"fp16 beside --sharding {self.sharding} is not simulated: set bf16, or drop --sharding.")
        if self.device == "cpu":
            raise UsageError("fp16 scales losses on GPUs only: drop --device cpu, or set bf16.")

    def _check_sharding(self) -> None:
        untorch = self.device == "cpu" or self.optim in _UNSHARDED
        if self.supervised and (self.sharded_by_zero or self.sharding == "tp"):
            where = "on one GPU, with ddp and with fsdp2: use one of these"
            raise UsageError(f"--trainer {self.trainer} is simulated {where}.")
        if self.recipe == "liger" and self.sharding in ("fsdp2", "tp"):
            raise UsageError(f"--recipe liger beside --sharding {self.sharding} is not simulated: use ddp, or zero2.")
        if self.sharding == "fsdp2" and untorch:
            raise UsageError("--sharding fsdp2 is simulated on CUDA, with torch's own AdamW: use --optim adamw_torch.")
        if self.sharding == "fsdp2" and self.load_in_4bit:
            raise UsageError("--load-in-4bit beside --sharding fsdp2: accelerate leaves such weights whole; use ddp.")
        if self.sharding == "tp" and (untorch or self.lora_r is not None):
            raise UsageError(
                "--sharding tp is simulated on CUDA for full fine-tuning with torch's own AdamW: drop --lora-r, and "
                "use --optim adamw_torch."
            )
        if self.sharded_by_zero and (untorch or self.load_in_4bit):
            raise UsageError(
                f"--sharding {self.sharding} is modelled on CUDA for bfloat16 weights and torch's own AdamW: use "
                "--optim adamw_torch, and drop --load-in-4bit."
            )

    @property
    def weights_dtype(self) -> str:
        """Return the parameters' dtype where they are trained: DeepSpeed's are bfloat16."""
        return "bfloat16" if self.sharded_by_zero else self.dtype

    def with_(self, **changes: Any) -> Settings:
        """Return a copy with some settings changed."""
        return replace(self, **{"assumed": tuple(n for n in self.assumed if n not in changes), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as it is kept in a snapshot."""
        plain = asdict(self)
        plain["lora_target_modules"] = list(self.lora_target_modules)
        plain["left_out"], plain["assumed"] = list(self.left_out), list(self.assumed)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Settings:
        """Return the settings that :meth:`to_dict` wrote."""
        return cls(**{**plain, "lora_target_modules": tuple(plain["lora_target_modules"])})


# Names that other tools' config files use for the same setting.
_ALIASES = {
    "model_name_or_path": "model",
    "max_prompt_length": "prompt_length",
    "max_completion_length": "completion_length",
    "lora_rank": "lora_r",
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "torch_dtype": "dtype",
    "activation_checkpointing": "gradient_checkpointing",
    "use_bnb_nested_quant": "bnb_4bit_use_double_quant",
}


def read_settings(path: str | Path) -> dict[str, Any]:
    """Read settings from a YAML or JSON file: those memprof knows; the rest of a GRPO config is passed over.

    Raises:
        InputError: the file cannot be read or holds no mapping, or a name in it is nearly that of a setting.
    """
    file = Path(path)
    try:
        refuse_special(file)
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read ({error}).") from None
    given = _parse(file, text)
    known = {f.name for f in fields(Settings)}
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = _ALIASES.get(str(key).replace("-", "_"), str(key).replace("-", "_"))
        if name not in known:
            _refuse_misspelt(file, name, known)
        if name not in known or value is None:
            continue
        if name == "lora_target_modules":
            value = tuple(value.split(",")) if isinstance(value, str) else value
            if not isinstance(value, (list, tuple)) or not all(isinstance(part, str) for part in value):
                raise InputError(f"{file}: lora_target_modules is {value!r:.40}; write a list of names.")
            value = tuple(value)
        if name in ("dtype", "bnb_4bit_compute_dtype"):
            value = str(value).removeprefix("torch.")
        values[name] = _number(name, value)
    if left_out := left_out_of({str(key).replace("-", "_"): value for key, value in given.items()}):
        values["left_out"] = left_out
    return _with_kind(said_by_trl(values, given), given)


def _number(name: str, value: Any) -> Any:
    """Read a number as TRL does where YAML takes it for a word (``1e-3``), or where JSON writes a whole one ``5e8``."""
    kind = kinds_of(Settings).get(name, ("",))[0]
    if kind not in ("int", "float") or isinstance(value, bool):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return value
    return number if kind == "float" else int(number) if number.is_integer() else value


# Names this alike are one, misspelt; per_device_eval_batch_size, TRL's own, is 0.87 like ours.
_MISSPELT = 0.93


def _refuse_misspelt(file: Path, name: str, known: set[str]) -> None:
    near = get_close_matches(name, known, 1, _MISSPELT)
    if near:
        raise InputError(f"{file}: {name} is no setting; {near[0]} is.")


def _with_kind(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Read the kind of checkpointing as transformers' and TRL's own arguments name it."""
    if values.get("gradient_checkpointing", True) is not True:
        return values
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        more = given.get(name)
        for key, kind in (("offload", "offloaded"), ("selective", "selective")):
            if isinstance(more, dict) and more.get(key):
                values["gradient_checkpointing"] = kind
    return values


def _parse(file: Path, text: str) -> dict[str, Any]:
    import json

    try:
        if file.suffix == ".json":
            data = json.loads(text)
        else:
            import yaml  # type: ignore[import-untyped]

            data = yaml.safe_load(text)
    except ImportError:
        raise InputError(f"{file}: reading YAML needs PyYAML; install it or write the file as JSON.") from None
    except ValueError as error:
        raise InputError(f"{file}: not valid {file.suffix or 'YAML'} ({str(error)[:80]}).") from None
    except Exception as error:  # yaml's own errors share no importable base without yaml
        raise InputError(f"{file}: not valid YAML ({str(error)[:80]}).") from None
    if not isinstance(data, dict):
        raise InputError(f"{file}: expected names and values, like a GRPOConfig written as YAML.")
    return data
