"""Hold the settings of one GRPO run, named as ``GRPOConfig``, ``LoraConfig`` and friends name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from memprof.config.optimizers import OPTIMIZERS, optimizer
from memprof.config.trl_arguments import left_out_of, said_by_trl
from memprof.errors import InputError, UsageError, did_you_mean
from memprof.files import refuse_special
from memprof.units import parse_size

__all__ = ["CHOICES", "TRAINERS_OWN", "Settings", "read_settings"]

CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("float32", "bfloat16", "float16"),
    "mixed_precision": ("no", "bf16", "fp16"),
    "attn": ("auto", "flash", "efficient", "math"),
    "padding": ("none", "worst"),
    "generation": ("hf", "none", "vllm"),
    "trainer": ("grpo", "rloo", "sft", "dpo"),
    "recipe": ("trl", "trl-full-logits", "trl-0.14", "liger", "lean"),
    "sharding": ("ddp", "fsdp2", "zero1", "zero2", "zero3", "tp"),
    "device": ("cuda", "cpu"),
    "gradient_checkpointing": ("none", "auto", "full", "selective", "offloaded"),
    "cache_implementation": ("dynamic", "static", "quantized"),
    "cache_dtype": ("auto", "fp8", "int4", "int2"),
    "bnb_4bit_compute_dtype": ("auto", "float32", "bfloat16", "float16"),
}
#: Defaults of TRL's other trainers where they are not those of :class:`Settings`, for who leaves a setting open.
TRAINERS_OWN: dict[str, dict[str, Any]] = {"rloo": {"beta": 0.05}}
_UNSHARDED = tuple(name for name in OPTIMIZERS if not optimizer(name).sharded)


@dataclass(frozen=True)
class Settings:
    """One run. Lengths are tokens, one sequence's; sizes are bytes.

    ``per_device_train_batch_size`` counts completions, as TRL does since 0.16. ``dtype`` is the parameters': TRL loads
    a model given by name in float32, and computes in bfloat16 (``mixed_precision``: ``bf16``, ``fp16`` or ``no``).
    ``gradient_checkpointing`` is False (``none``), True (``full``), ``selective`` or ``offloaded``; the lean trainer's
    True is ``auto``, its default, and ``full`` a kind of its own. ``host_memory`` is a node's, such as ``256GB``.
    ``trainer`` is ``grpo`` or ``rloo``; or ``sft`` or ``dpo``, which generate nothing: ``per_device_train_batch_size``
    then counts rows, or pairs of a chosen and a rejected row, of ``max_length`` tokens each where that is given.
    ``left_out`` names what a config file switches on and no simulation executes; ``assumed`` names the settings whose
    defaults stand because nobody gave a value.
    ``bnb_4bit_compute_dtype`` ``auto`` is autocast's dtype, or the weights'.
    The ``stage3_`` limits and ``reduce_bucket_size`` are DeepSpeed's, in elements, with its own defaults.
    """

    model: str
    trainer: str = "grpo"
    max_length: int | None = None
    dtype: str = "float32"
    mixed_precision: str = "bf16"
    lora_r: int | None = None
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    lora_dropout: float = 0.0
    load_in_4bit: bool = False
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str = "auto"
    num_generations: int = 8
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    steps_per_generation: int | None = None
    num_iterations: int = 1
    prompt_length: int = 512
    completion_length: int = 256
    images: int = 0
    image_size: str = "1024x1024"
    gradient_checkpointing: bool | str = True
    beta: float = 0.0
    optim: str = "adamw_torch_fused"
    max_grad_norm: float | None = 1.0
    loss_type: str = "dapo"
    attn: str = "auto"
    padding: str = "none"
    generation: str = "hf"
    cache_implementation: str = "dynamic"
    cache_dtype: str = "auto"
    reward_model: str | None = None
    vllm_gpu_memory_utilization: float = 0.3
    vllm_enable_sleep_mode: bool = False
    recipe: str = "trl"
    max_tokens_per_piece: int | None = None
    tiled_mlp: int | None = None
    prefix_sharing: bool = False
    generation_batch: int | None = None
    park_weights: bool = False
    gpus: int = 1
    gpus_per_node: int = 8
    host_memory: str | None = None
    sharding: str = "ddp"
    reduce_bucket_size: int = 500_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    alloc_conf: str = ""
    device: str = "cuda"
    gpu: str | None = None
    left_out: tuple[str, ...] = ()
    assumed: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        self._check_kinds()
        object.__setattr__(self, "gradient_checkpointing", self._one_name_a_kind())
        object.__setattr__(self, "left_out", tuple(self.left_out))
        object.__setattr__(self, "assumed", tuple(self.assumed))
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if isinstance(value, str) and value not in allowed:
                meant = did_you_mean(value, allowed)
                raise UsageError(f"--{name.replace('_', '-')} {value!r}{meant}: choose from {', '.join(allowed)}.")
        if self.host_memory is not None:
            parse_size(str(self.host_memory))
        self._check_trainer()
        self._check_numbers()
        self._check_optimizer()
        self._check_generation()
        self._check_lean()
        self._check_fp16()
        self._check_together()
        self._check_images()

    def _check_kinds(self) -> None:
        for name, kinds in _kinds_of_settings().items():
            value = getattr(self, name)
            if not any(_is_a(value, kind) for kind in kinds):
                raise UsageError(f"--{name.replace('_', '-')} {value!r}: give {_KINDS[kinds[0]]}.")

    def _one_name_a_kind(self) -> bool | str:
        kind = self.gradient_checkpointing
        if kind == "none":
            return False
        if self.recipe == "lean":
            return "auto" if kind is True else kind
        return True if kind in ("auto", "full") else kind

    def _check_trainer(self) -> None:
        if not self.supervised:
            if self.max_length is not None:
                raise UsageError("--max-length is of --trainer sft and dpo: others have --prompt-length and more.")
            if self.trainer == "rloo" and self.recipe in ("liger", "trl-0.14"):
                raise UsageError(f"--recipe {self.recipe} is a loss of GRPO's: drop it, or --trainer rloo.")
            return
        full = self.trainer == "sft" and self.recipe == "trl-full-logits"
        if (self.recipe != "trl" and not full) or self.reward_model is not None:
            raise UsageError(
                f"--trainer {self.trainer} is TRL's own: drop --recipe (sft also takes trl-full-logits) and "
                "--reward-model."
            )
        if self.sharded_by_zero or (self.gpus > 1 and self.sharding == "tp"):
            where = "on one GPU, with ddp and with fsdp2: use one of these"
            raise UsageError(f"--trainer {self.trainer} is simulated {where}.")
        if self.max_length is None:
            return
        if self.max_length < 2:
            raise UsageError("--max-length must be at least 2.")
        prompt = self.prompt_length if self.prompt_length < self.max_length else self.max_length // 2
        object.__setattr__(self, "prompt_length", prompt)
        object.__setattr__(self, "completion_length", self.max_length - prompt)

    def _check_lean(self) -> None:
        for name in ("max_tokens_per_piece", "tiled_mlp", "generation_batch"):
            value = getattr(self, name)
            if value is not None and value < (name != "tiled_mlp"):  # 0 tokens: no tiles, however long sequences are
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1.")
            if value is not None and self.recipe != "lean":
                raise UsageError(f"--{name.replace('_', '-')} is of the lean trainer: add --recipe lean.")
        if self.prefix_sharing and self.recipe != "lean":
            raise UsageError("--prefix-sharing is of the lean trainer: add --recipe lean.")
        if self.park_weights:
            self._check_parking()

    def _check_parking(self) -> None:
        if self.recipe != "lean":
            raise UsageError("--park-weights is of the lean trainer: add --recipe lean.")
        if self.generation != "vllm" or not self.vllm_enable_sleep_mode:
            raise UsageError(
                "--park-weights makes room for an engine that sleeps: add --generation vllm --vllm-enable-sleep-mode."
            )
        if self.gpus > 1 and self.sharding != "ddp":
            raise UsageError("--park-weights moves whole parameters: drop --sharding, or use --sharding ddp.")

    def _check_numbers(self) -> None:
        for name in (
            "num_generations",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "prompt_length",
            "completion_length",
            "gpus",
            "gpus_per_node",
            "num_iterations",
        ):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1.")
        if self.max_grad_norm is None:
            raise UsageError("max_grad_norm None ends in a TypeError of transformers' trainer: give 0 to clip nothing.")
        if not 0 < self.vllm_gpu_memory_utilization <= 1:
            raise UsageError("--vllm-gpu-memory-utilization is a share of the card: above 0, at most 1.")
        if self.lora_r is not None and self.lora_r < 1:
            raise UsageError("--lora-r must be at least 1.")
        if not 0 <= self.lora_dropout < 1 or (self.lora_dropout and self.lora_r is None):
            raise UsageError("--lora-dropout is a share below 1, of an adapter's inputs: add --lora-r 16.")

    def _check_optimizer(self) -> None:
        if self.optim not in OPTIMIZERS:
            asked = f"--optim {self.optim!r}{did_you_mean(self.optim, OPTIMIZERS)}"
            raise UsageError(f"{asked} cannot be simulated; choose from {', '.join(OPTIMIZERS)}.")

    def _check_generation(self) -> None:
        if self.cache_implementation != "dynamic" and self.generation != "hf":
            raise UsageError("--cache-implementation is of transformers' own generation: drop it or --generation.")
        if self.cache_implementation == "static" and self.weights_dtype == "float32" and self.mixed_precision != "no":
            raise UsageError(
                "--cache-implementation static fails in a real run too with float32 weights under autocast (keys and "
                "values differ in dtype): add --dtype bfloat16."
            )
        if self.cache_dtype != "auto" and self.cache_implementation != "quantized":
            raise UsageError("--cache-dtype is how a quantised cache is kept: add --cache-implementation quantized.")
        if self.generation == "vllm" and self.sharding in ("fsdp2", "tp"):
            raise UsageError(
                f"--generation vllm beside --sharding {self.sharding} is not simulated yet; use --generation none."
            )
        if self.generation == "vllm" and self.device == "cpu":
            raise UsageError("--generation vllm runs on a GPU; drop --device cpu.")

    def _check_images(self) -> None:
        """Refuse, by name, what is not simulated beside images."""
        if not self.images:
            return
        width, height = self.image_pixels
        if self.images < 0 or not width or not height:
            raise UsageError("--images counts a prompt's images, and --image-size is their WIDTHxHEIGHT: above 0.")
        if self.trainer != "grpo" or self.recipe != "trl":
            raise UsageError(
                "--images is simulated for TRL's GRPO step: drop --trainer and --recipe (the lean trainer takes TRL's "
                "step for images)."
            )
        if self.generation != "none":
            raise UsageError("Generation from images is not simulated: add --generation none for the training's peak.")
        if self.gpus > 1:
            raise UsageError("--images is simulated on one GPU: drop --gpus.")

    @property
    def image_pixels(self) -> tuple[int, int]:
        """Return an image's width and height."""
        width, by, height = self.image_size.lower().partition("x")
        if not (by and width.isdecimal() and height.isdecimal()):
            raise UsageError(f"--image-size {self.image_size!r} is not WIDTHxHEIGHT in pixels, such as 1024x768.")
        return int(width), int(height)

    def _check_fp16(self) -> None:
        """Refuse what a run with fp16's loss scaler refuses, and what is not simulated with it."""
        if self.mixed_precision != "fp16":
            return
        if self.dtype == "float16" and self.lora_r is None:
            raise UsageError("fp16 over float16 weights fails in a real run too: load them with --dtype float32.")
        if self.gpus > 1 and self.sharding != "ddp":
            raise UsageError(f"fp16 beside --sharding {self.sharding} is not simulated: set bf16, or drop --sharding.")
        if self.device == "cpu":
            raise UsageError("fp16 scales losses on GPUs only: drop --device cpu, or set bf16.")

    def _check_together(self) -> None:
        if self.gpus == 1 and self.sharding != "ddp":
            raise UsageError(f"--sharding {self.sharding} divides a run among several GPUs: add --gpus 2, or more.")
        if self.load_in_4bit and self.lora_r is None:
            raise UsageError("--load-in-4bit needs an adapter to train: add --lora-r 16.")
        if not self.load_in_4bit and (self.bnb_4bit_use_double_quant or self.bnb_4bit_compute_dtype != "auto"):
            raise UsageError("--bnb-4bit-use-double-quant and --bnb-4bit-compute-dtype need --load-in-4bit.")
        if self.sharding == "fsdp2" and (self.device == "cpu" or self.optim in _UNSHARDED):
            raise UsageError("--sharding fsdp2 is simulated on CUDA, with torch's own AdamW: use --optim adamw_torch.")
        if self.recipe == "liger" and self.sharding in ("fsdp2", "tp"):
            raise UsageError(f"--recipe liger beside --sharding {self.sharding} is not simulated: use ddp, or zero2.")
        if self.sharding == "fsdp2" and self.load_in_4bit:
            raise UsageError("--load-in-4bit beside --sharding fsdp2: accelerate leaves such weights whole; use ddp.")
        if self.sharding == "tp" and (self.device == "cpu" or self.optim in _UNSHARDED or self.lora_r is not None):
            raise UsageError(
                "--sharding tp is simulated on CUDA for full fine-tuning with torch's own AdamW: drop --lora-r, and "
                "use --optim adamw_torch."
            )
        if self.sharded_by_zero and (self.device == "cpu" or self.optim in _UNSHARDED or self.load_in_4bit):
            raise UsageError(
                f"--sharding {self.sharding} is modelled on CUDA for bfloat16 weights and torch's own AdamW: use "
                "--optim adamw_torch, and drop --load-in-4bit."
            )
        if self.checkpointing == "offloaded" and self.device == "cpu":
            raise UsageError("--gradient-checkpointing offloaded frees a GPU: drop --device cpu.")
        if self.supervised:
            return
        if self.num_generations < 2:
            raise UsageError("--num-generations must be at least 2: its trainer compares completions of one prompt.")
        batch = self.per_device_train_batch_size * self.replicas * self.generation_steps
        if batch % self.num_generations:
            raise UsageError(
                f"the generation batch ({batch} = per-device batch {self.per_device_train_batch_size} x "
                f"{self.replicas} GPU(s) x {self.generation_steps} steps per generation) is not a multiple of "
                f"--num-generations {self.num_generations}, which TRL refuses."
            )

    @property
    def generation_steps(self) -> int:
        """Count the micro-batches that share one generation; TRL's default is the accumulation's."""
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def supervised(self) -> bool:
        """Tell whether the rows are given, and nothing is generated."""
        return self.trainer in ("sft", "dpo")

    @property
    def sharded_by_zero(self) -> bool:
        """Tell whether DeepSpeed's ZeRO divides the run over several GPUs."""
        return self.gpus > 1 and self.sharding.startswith("zero")

    @property
    def replicas(self) -> int:
        """Count the ranks with completions of their own; those of a tensor-parallel group share theirs."""
        return 1 if self.sharding == "tp" else self.gpus

    @property
    def whole_nowhere(self) -> bool:
        """Tell whether parameters are divided before a rank ever holds a whole model."""
        return self.gpus > 1 and self.sharding in ("fsdp2", "zero3", "tp")

    @property
    def weights_dtype(self) -> str:
        """Return the parameters' dtype where they are trained: DeepSpeed's are bfloat16."""
        return "bfloat16" if self.sharded_by_zero else self.dtype

    @property
    def checkpointing(self) -> str:
        """Return ``none``, ``full``, ``selective`` or ``offloaded``; of the lean trainer also ``auto``."""
        kind = self.gradient_checkpointing
        return kind if isinstance(kind, str) else "full" if kind else "none"

    @property
    def sequence_length(self) -> int:
        """Count the tokens of a prompt and its completion."""
        return self.prompt_length + self.completion_length

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


_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a word"}


@cache
def _kinds_of_settings() -> dict[str, tuple[str, ...]]:
    """Return the kinds of value that each setting takes, the first one of :data:`_KINDS`; lists are left out."""
    said = {f.name: tuple(str(f.type).split(" | ")) for f in fields(Settings)}
    return {name: kinds for name, kinds in said.items() if kinds[0] in _KINDS}


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or kind == "bool":
        return isinstance(value, bool) and kind == "bool"
    if kind == "None":
        return value is None
    return isinstance(value, (int, float) if kind == "float" else int if kind == "int" else str)


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
    kind = _kinds_of_settings().get(name, ("",))[0]
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
