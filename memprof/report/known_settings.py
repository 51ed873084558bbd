"""Read settings of a run from plain data, as far as a prediction's error and what is assumed depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import msgspec


class KnownSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that a report, a snapshot or a program's own ``config`` may have; each is ``None`` or empty if not.

    The fields are named as those of :class:`memprof.config.settings.Settings`.

    Attributes:
        names: names of the settings that are known.
    """

    names: frozenset[str] = frozenset()
    adapter_options: Mapping[str, object] = {}
    assumed: tuple[str, ...] = ()
    attn: str | None = None
    beta: int | float | None = None
    cache_dtype: str | None = None
    cache_implementation: str | None = None
    completion_length: int | None = None
    device: str | None = None
    dtype: str | None = None
    generation: str | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    gradient_checkpointing: bool | str | None = None
    host_memory: str | None = None
    left_out: tuple[str, ...] = ()
    load_in_4bit: bool | None = None
    lora_r: int | None = None
    loss_type: str | None = None
    mixed_precision: str | None = None
    model: str | None = None
    modules_to_save: tuple[str, ...] = ()
    num_generations: int | None = None
    optim: str | None = None
    padding: str | None = None
    peft_type: str | None = None
    per_device_train_batch_size: int | None = None
    prompt_length: int | None = None
    recipe: str | None = None
    reward_model: str | None = None
    sharding: str | None = None
    trainer: str | None = None
    trainer_options: Mapping[str, object] = {}
    use_dora: bool | None = None

    @classmethod
    def of(cls, plain: Mapping[str, object] | None) -> KnownSettings:
        """Read plain data, without the settings whose value is of another type."""
        found: dict[str, object] = {}
        for field in msgspec.structs.fields(cls):
            if plain and plain.get(field.name) is not None and field.name != "names":
                with suppress(msgspec.ValidationError):
                    found[field.name] = msgspec.convert(plain[field.name], field.type)
        known = [name for name in plain or () if name in found or (plain and plain[name] is None)]
        return msgspec.convert({**found, "names": known}, cls)

    @property
    def trainer_kind(self) -> str:
        """Return the trainer, TRL's GRPO if none is known."""
        return self.trainer or "grpo"

    def value(self, name: str) -> str | int | float | bool | None:
        """Return a setting that is a single value."""
        found: str | int | float | bool | None = getattr(self, name, None)
        return found
