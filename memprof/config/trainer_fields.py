"""Say what memprof does with each field of the configurations that a run is written in (``trainer_fields.toml``).

A field is *simulated* by a setting, *executed* by its own configuration class, changes no memory, or is *not
simulated*: then it is an error, or with ``--allow-unsimulated`` left out with a note and a wider range. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec

from memprof.files import read_toml
from memprof.report.run import KnownSettings

#: The configuration class of each of TRL's trainers.
TRAINER_CLASSES = {"grpo": "GRPOConfig", "rloo": "RLOOConfig", "sft": "SFTConfig", "dpo": "DPOConfig"}
#: The configuration class of each kind of adapter that is simulated.
ADAPTER_CLASSES = {"LORA": "LoraConfig", "IA3": "IA3Config", "PROMPT_TUNING": "PromptTuningConfig"}
#: Fields whose value is a mapping with fields of its own.
NESTED = ("model_init_kwargs", "generation_kwargs")
_COMMON = ("TrainingArguments", "ModelConfig", "BitsAndBytesConfig", "ScriptArguments")


@dataclass(frozen=True)
class Arguments:
    """Keyword arguments of a configuration class, kept as JSON so that settings can be compared and hashed."""

    text: str = "{}"

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Arguments:
        return cls(json.dumps(dict(values), sort_keys=True, default=str))

    def to_dict(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.text)
        return found

    def __bool__(self) -> bool:
        return self.text != "{}"


NO_ARGUMENTS = Arguments()


@dataclass(frozen=True)
class Unsimulated:
    """Describe a field that changes memory and that no simulation follows.

    Attributes:
        name: the field's, after its place (``model_init_kwargs.num_labels``).
        why: what it changes, to stand after its name.
        low, high: how much more of the predicted peak a real run needs, at least and at most (0.1: a tenth more).
        neutral: values with which nothing changes, beside None, False, 0 and empty ones.
        unless: values of a run's settings, by name, with one of which the field is simulated.
        noted: it is outside the training step, and is only noted.
    """

    name: str
    why: str
    low: float
    high: float
    neutral: tuple[object, ...] = ()
    unless: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    noted: bool = False

    def is_simulated_by(self, settings: KnownSettings) -> bool:
        """Tell whether settings say the same in memprof's own words."""
        return any(settings.value(name) in values for name, values in self.unless.items())

    def sentence(self) -> str:
        return f"{self.name} is not simulated: it {self.why}."


@dataclass(frozen=True)
class ClassFields:
    """Sort the fields of one configuration class. ``executed`` maps a field to its default and an example."""

    name: str
    simulated: frozenset[str]
    no_memory: frozenset[str]
    earlier: frozenset[str]
    executed: Mapping[str, tuple[object, object]]
    not_simulated: Mapping[str, Unsimulated]

    def __contains__(self, name: object) -> bool:
        listed = self.simulated | self.no_memory | self.earlier
        return name in listed or name in self.executed or name in self.not_simulated


@cache
def class_fields() -> dict[str, ClassFields]:
    """Return the table, by the names of its classes."""
    rows = msgspec.convert(read_toml(Path(__file__).with_suffix(".toml")), dict[str, _ClassRow])
    return {name: _class_of(name, row) for name, row in rows.items()}


class _ExecutedRow(msgspec.Struct, frozen=True):
    """A row of ``executed``: an example of the field's value, and its default."""

    example: object
    default: object = None


class _UnsimulatedRow(msgspec.Struct, frozen=True):
    """A row of ``not_simulated``; ``effect`` is the least and the most percent of the predicted peak."""

    why: str
    effect: tuple[float, float]
    neutral: tuple[object, ...] = ()
    unless: dict[str, tuple[object, ...]] = {}
    noted: bool = False


class _ClassRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of ``trainer_fields.toml``: the fields of one configuration class."""

    simulated: frozenset[str]
    no_memory: frozenset[str]
    earlier: frozenset[str] = frozenset()
    executed: dict[str, _ExecutedRow] = {}
    not_simulated: dict[str, _UnsimulatedRow] = {}


def _class_of(name: str, row: _ClassRow) -> ClassFields:
    place = f"{name}." if name in NESTED else ""
    return ClassFields(
        name,
        simulated=row.simulated,
        no_memory=row.no_memory,
        earlier=row.earlier,
        executed={name: (of.default, of.example) for name, of in row.executed.items()},
        not_simulated={
            field_name: Unsimulated(
                place + field_name, of.why, of.effect[0] / 100, of.effect[1] / 100, of.neutral, of.unless, of.noted
            )
            for field_name, of in row.not_simulated.items()
        },
    )


def class_with(name: str, trainer: str | None = None, peft_type: str | None = None) -> ClassFields | None:
    """Find the configuration class that has a field; None for a field of none.

    Args:
        name: the field's; after its place where it stands in another field's mapping (``generation_kwargs.num_beams``).
        trainer: of the run, whose class comes first; without it, any trainer's class will do.
        peft_type: of the run's adapter; LoRA's is the default.
    """
    place, dot, inner = name.rpartition(".")
    table = class_fields()
    if dot:
        nested = table.get(place)
        return nested if nested is not None and inner in nested else None
    wanted = [TRAINER_CLASSES.get(str(trainer)), *_COMMON, ADAPTER_CLASSES.get(str(peft_type).upper(), "LoraConfig")]
    known = [*wanted, *TRAINER_CLASSES.values(), *ADAPTER_CLASSES.values()]
    return next((table[of] for of in known if of is not None and name in table[of]), None)


def unsimulated_field(name: str, trainer: str | None = None, peft_type: str | None = None) -> Unsimulated | None:
    """Return the row of a field that is not simulated; None for other fields."""
    found = class_with(name, trainer, peft_type)
    return found.not_simulated.get(name.rpartition(".")[2]) if found is not None else None


def left_out_of(
    given: Mapping[str, object], trainer: str | None = None, peft_type: str | None = None
) -> tuple[str, ...]:
    """List the fields of ``given``, those of nested mappings too, whose value changes memory and is not simulated."""
    found = []
    for name, value in flat_fields(given):
        row = unsimulated_field(name, trainer, peft_type)
        if row is not None and value and not any(value == same for same in row.neutral):
            found.append(name)
    return tuple(found)


def executed_of(
    given: Mapping[str, object], trainer: str | None = None, peft_type: str | None = None
) -> tuple[Arguments, Arguments]:
    """Return what of ``given`` goes to the adapter's and to the trainer's own configuration class as it is."""
    table = class_fields()
    adapter = table[ADAPTER_CLASSES.get(str(peft_type).upper(), "LoraConfig")].executed
    theirs = table[TRAINER_CLASSES.get(str(trainer), "GRPOConfig")].executed
    adapter_arguments, trainer_arguments = (
        {name: given[name] for name in of if given.get(name) is not None and given[name] != of[name][0]}
        for of in (adapter, theirs)
    )
    return Arguments.of(adapter_arguments), Arguments.of(trainer_arguments)


def flat_fields(given: Mapping[str, object]) -> list[tuple[str, object]]:
    """List fields and values, those of :data:`NESTED` mappings after the name of their place."""
    found = []
    for name, value in given.items():
        found.append((name, value))
        if name in NESTED and isinstance(value, Mapping):
            found += [(f"{name}.{inner}", of) for inner, of in value.items()]
    return found


def unsimulated_of(settings: KnownSettings) -> list[Unsimulated]:
    """List the fields that a run leaves out; those that its settings simulate excepted."""
    found = []
    for name in settings.left_out:
        row = unsimulated_field(name, settings.trainer, settings.peft_type)
        row = row or Unsimulated(name, "may change memory", -0.5, 0.5)
        if not row.is_simulated_by(settings):
            found.append(row)
    return found
