"""Say how far predictions were off where they could be compared: the one place that every screen quotes.

``python -m benchmarks.simulator table`` writes ``comparisons.json``: every comparison, each in the class of runs that
it speaks for, and how many of those whose settings are known exactly have each part of a run. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from memprof.config.catalogue import find_config
from memprof.config.gpus import Gpu
from memprof.config.model_shape import ModelShape
from memprof.config.trainer_fields import unsimulated_of
from memprof.errors import InputError
from memprof.report.run import KnownSettings
from memprof.report.simulation import Assumed, ErrorClass, ErrorRange, ExpectedError

#: Classes of comparisons that are not named after a trainer.
CAPTURED, TRACED, PUBLISHED = "programs on GPUs", "TRL runs on a CPU", "GPU runs known by a text"
# Of so many comparisons the next lies between the lowest and the highest with 90% (exchangeable: (n - 1) / (n + 1)).
_ENOUGH = 20
# No range is stated narrower: figures on screens have few digits.
_LEAST = 0.001
# No field that is left out makes a need smaller than this share of the simulated one.
_LEAST_NEED = 0.1
# They add the same tensors over the tokens.
_TOKEN_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")


class MeasuredPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction beside a measurement.

    Attributes:
        name: the run.
        kind: the class of runs that it speaks for.
        where: ``gpu``, ``emulated``, ``cpu`` or ``published``.
        what: ``peak``, ``allocated``, ``reserved``, ``device`` or ``generation``.
        measured_bytes: what the run needed.
        simulated_bytes: what was predicted.
    """

    name: str
    kind: str = msgspec.field(name="class")
    where: str
    what: str
    measured_bytes: int
    simulated_bytes: int

    @property
    def error(self) -> float:
        """Return the signed relative error of the prediction."""
        return self.simulated_bytes / self.measured_bytes - 1


class _Packaged(msgspec.Struct, frozen=True):
    """The contents of ``comparisons.json``: ``compared`` counts the exactly known runs that have each part."""

    comparisons: tuple[MeasuredPrediction, ...]
    compared: dict[str, int]


@lru_cache(maxsize=1)
def _packaged() -> _Packaged:
    return msgspec.json.decode(Path(__file__).with_name("comparisons.json").read_bytes(), type=_Packaged)


def comparisons() -> tuple[MeasuredPrediction, ...]:
    """Return every comparison."""
    return _packaged().comparisons


def stated_range(errors: Sequence[float]) -> tuple[float, float]:
    """Return the range that is stated of a class with these errors: nine of ten further ones are to lie inside.

    Twenty errors are enough to take the lowest and the highest; with fewer, each end is moved outwards by as large a
    share of their distance as is lacking to twenty.
    """
    low, high = min(errors), max(errors)
    wider = (high - low) * max(0, _ENOUGH - len(errors)) / _ENOUGH
    return min(low - wider, -_LEAST), max(high + wider, _LEAST)


def class_of(config: KnownSettings) -> str:
    """Name the class of runs on the real allocator that a run with these settings belongs to: trainer, and what is
    trained."""
    trainer = config.trainer_kind
    if trainer == "grpo" and config.recipe == "lean":
        return "lean trainer on an emulated GPU"
    kind = config.peft_type or "LORA"
    lora = "full" if config.lora_r is None else "QLoRA" if config.load_in_4bit else "LoRA"
    tuned = lora if kind == "LORA" else kind
    return f"{'TRL' if trainer == 'grpo' else trainer.upper()}, {tuned}, on an emulated GPU"


def parts_of(config: KnownSettings, card: Gpu | None = None) -> list[str]:
    """List the parts of a run with these settings that a comparison can cover or lack, in words."""
    several, sharding = (config.gpus or 1) > 1, config.sharding or "ddp"
    lean, trainer, generation = config.recipe == "lean", config.trainer_kind, config.generation
    cache = config.cache_implementation or "dynamic"
    parts = {
        f"trainer {trainer}": trainer in ("rloo", "sft", "dpo"),
        f"recipe {config.recipe}": config.recipe not in (None, "trl"),
        f"loss {config.loss_type}": config.loss_type not in (None, *_TOKEN_LOSSES),
        "LoRA": config.lora_r is not None,
        f"{config.peft_type} adapters": config.peft_type not in (None, "LORA"),
        "DoRA": bool(config.use_dora),
        "modules trained with an adapter": bool(config.modules_to_save),
        **dict.fromkeys(config.adapter_options, True),
        **dict.fromkeys(config.trainer_options, True),
        "4-bit layers": bool(config.load_in_4bit),
        f"optimizer {config.optim}": config.optim not in (None, "none"),
        "vLLM's pool": generation == "vllm",
        "token-by-token generation": generation == "hf",
        f"{cache} cache": cache != "dynamic" and generation == "hf",
        f"{config.cache_dtype} keys and values": config.cache_dtype in ("fp8", "int4", "int2"),
        f"sharding {sharding}": several and sharding != "ddp",
        "gradient buckets": several and sharding == "ddp",
        f"{'lean ' if lean else ''}checkpointing {config.gradient_checkpointing}": isinstance(
            config.gradient_checkpointing, str
        ),
        "a reward model": bool(config.reward_model),
        "AMD GPUs": card is not None and card.name.startswith("MI"),
        "padding": config.padding == "worst",
        **dict.fromkeys(_of_model(config.model or ""), True),
    }
    return [name for name, present in parts.items() if present]


@lru_cache(maxsize=64)
def _of_model(name: str) -> tuple[str, ...]:
    try:
        return model_parts(find_config(name)) if name else ()
    except (InputError, OSError):  # of a report read elsewhere
        return ()


def model_parts(config: Mapping[str, object]) -> tuple[str, ...]:
    """List what sets a model with this config apart from a plain decoder, in words."""
    shape = ModelShape.of(config)
    found = {
        "a mixture of experts": shape.experts > 0,
        "latent attention": shape.latent > 0,
        **{f"{kind.replace('_', ' ')} layers": True for kind in shape.layer_kinds if kind != "full_attention"},
    }
    return tuple(part for part, present in sorted(found.items()) if present)


def not_compared(config: KnownSettings, card: Gpu | None = None) -> list[str]:
    """List the parts of a run with these settings that no comparison of exactly known settings has."""
    return [part for part in parts_of(config, card) if part not in _packaged().compared]


def class_compared(config: KnownSettings) -> bool:
    """Tell whether the class of a run with these settings was compared with what runs for real."""
    return _classes_of([config])[0] != CAPTURED


def expected_error(*configs: KnownSettings, card: Gpu | None = None) -> ExpectedError:
    """Return what is known of the error of predictions with these settings, without the margin of a verdict.

    ``allocated`` and ``reserved`` state a signed range (simulated / measured - 1) for the case that what was given is
    what runs: it contains the range of programs on GPUs and that of the run's own class, in each of which nine of ten
    comparisons lie whose settings are known exactly. ``basis`` lists both; ``not_compared`` names what no comparison
    covers; ``assumed`` lists settings that nobody gave, with the values taken, those that memory usually follows most
    first.
    """
    lacking = {field.name: field for config in configs for field in unsimulated_of(config)}
    low, high = (1 + sum(getattr(field, side) for field in lacking.values()) for side in ("low", "high"))
    names = _classes_of(configs)
    found = ExpectedError(
        name=names[0],
        allocated=_widened(_range(names, "reserved"), low, high),
        reserved=_widened(_range(names, "allocated", "peak", "generation"), low, high),
        not_simulated=tuple(lacking),
        not_compared=tuple(dict.fromkeys(part for config in configs for part in not_compared(config, card))),
        assumed=_assumed(configs),
        basis=tuple(_class(name) for name in names),
        sentence="",
    )
    return msgspec.structs.replace(found, sentence=_sentence(found))


def _classes_of(configs: Sequence[KnownSettings]) -> list[str]:
    """Name the classes whose comparisons speak for runs with these settings; a run of no class is a program."""
    if any(config.device == "cpu" for config in configs):
        return [TRACED]
    known = {row.kind for row in comparisons()}
    wanted = dict.fromkeys(class_of(config) for config in configs if config.recipe)
    return [*(name for name in wanted if name in known), CAPTURED]


def _assumed(configs: Sequence[KnownSettings]) -> tuple[Assumed, ...]:
    """List what every one of these runs leaves open, where they take the same value."""
    first, *others = configs
    return tuple(
        Assumed(setting=name, value=first.value(name))
        for name in first.assumed
        if all(name in more.assumed and more.value(name) == first.value(name) for more in others)
    )


def _class(name: str) -> ErrorClass:
    found = _range([name])
    return ErrorClass(name=name, low=found.low, high=found.high, comparisons=found.comparisons)


def _range(names: Sequence[str], *without: str) -> ErrorRange:
    """State a range that contains that of each of some classes, all that was measured of them but these kinds.

    Each class has its own: the many runs on the emulated GPU, which are nearly exact, say nothing of how far the next
    program on a GPU is off.
    """
    errors = [[row.error for row in comparisons() if row.kind == name and row.what not in without] for name in names]
    ranges = [stated_range(of_class) for of_class in errors if of_class]
    if not ranges:  # a CPU reserves nothing
        return ErrorRange(low=0.0, high=0.0, comparisons=0)
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    return ErrorRange(low=round(low, 4), high=round(high, 4), comparisons=sum(map(len, errors)))


def _widened(found: ErrorRange, low: float, high: float) -> ErrorRange:
    """Widen a range of errors for a need that is really ``low`` to ``high`` times what was simulated."""
    if not found.comparisons or low == high == 1:
        return found
    least = (1 + found.low) / max(high, 1) - 1
    most = (1 + found.high) / min(max(low, _LEAST_NEED), 1) - 1
    return msgspec.structs.replace(found, low=round(least, 4), high=round(most, 4))


def _sentence(found: ExpectedError) -> str:
    words = f"If these settings are what runs: allocated {_spread(found.allocated)}"
    if found.reserved.comparisons:
        words += f", reserved {_spread(found.reserved)}"
    words += f" ({', '.join(f'{of.comparisons} of {of.name}' for of in found.basis or ())})."
    if found.not_simulated:
        words += f" Not simulated: {', '.join(found.not_simulated)}, which the range allows for."
    if found.not_compared:
        words += f" Never compared: {', '.join(found.not_compared)}."
    if found.assumed:
        taken = ", ".join(f"{of.setting} {_word(of.value)}" for of in found.assumed)
        words += f" Assumed, because nobody gave it: {taken}."
    return words


def _word(value: str | int | float | bool | None) -> str:
    return "none" if value is None else "on" if value is True else "off" if value is False else str(value)


def _spread(seen: ErrorRange) -> str:
    """Write a range in percent: signed, true minuses, two digits that count."""
    low, high = (f"{100 * side:+.{0 if abs(side) >= 0.1 else 1}f}" for side in (seen.low, seen.high))
    return f"{low} to {high}%".replace("-", "−")
