"""List the sizes a search chooses from: completion lengths, micro-batches or generations, as changes of settings."""

from __future__ import annotations

from collections.abc import Collection
from math import gcd

from memprof.config.catalogue import find_config
from memprof.config.model_shape import positions_of
from memprof.config.settings import Settings, TrainerSettings
from memprof.plan.simulations import Changes, SizeChoices
from memprof.report.plan import Aim

MAXIMIZE: tuple[Aim, ...] = ("context", "num_generations", "batch")
#: A search ends when this share of what may be used is; the rest is not worth another simulation.
ENOUGH = 0.97
_LIMITS = {"context": 131_072, "num_generations": 256, "batch": 1024}
_STEP = 64  # tokens
_MOST_SEQUENCES = 4096  # that one process generates: the lean trainer's schedule of more takes minutes to simulate


def choices(base: Settings, what: str) -> SizeChoices:
    """List what a search may change ``base`` to, as the question to a simulation that resizes itself.

    Args:
        base: a method's settings, as given.
        what: one of :data:`MAXIMIZE`, or ``speed``.
    """
    first, more = _lists(base, what)
    return SizeChoices(of=base.to_dict(), first=tuple(first), more=tuple(more), enough=ENOUGH)


def _lists(base: Settings, what: str) -> tuple[list[Changes], list[Changes]]:
    if what in ("num_generations", "batch"):
        least = _step_of(base, what)
        sizes = range(2 if what == "num_generations" else least, most_of(base, what) + 1, least)
        return [{"per_device_train_batch_size": n, **({what: n} if what != "batch" else {})} for n in sizes], []
    batches = _same_work(base)
    if what == "speed":
        return batches, []
    least, given, most = base.prompt_length + _STEP, base.sequence_length, most_of(base, what)
    shorter = [{**batches[0], **_to(base, n)} for n in range(least, given, _STEP)]
    longer = [_to(base, n) for n in range((given // _STEP + 1) * _STEP, most // _STEP * _STEP + 1, _STEP)]
    return [*shorter, *batches], longer


def _step_of(base: Settings, what: str) -> int:
    """Return how far apart sizes are: micro-batches where TRL takes a generation of them, in tokens for a context."""
    if what == "batch":
        return base.num_generations // gcd(base.num_generations, base.generation_steps * base.replicas)
    return _STEP if what == "context" else 1


def _to(base: TrainerSettings, length: int) -> Changes:
    return {"completion_length": length - base.prompt_length}


def _same_work(base: Settings) -> list[Changes]:
    """List the micro-batches that make the same step, the smallest first."""
    found, settings = [base], base
    while (smaller := halved(settings)) is not None and smaller.sequence_length == base.sequence_length:
        found.append(smaller)
        settings = smaller
    return [
        {
            "per_device_train_batch_size": s.per_device_train_batch_size,
            "gradient_accumulation_steps": s.gradient_accumulation_steps,
            "steps_per_generation": s.steps_per_generation,
        }
        for s in reversed(found)
    ]


def most_of(settings: Settings, what: str) -> int:
    """Return how much is worth trying: for a context, at most what the model was made for.

    Of others, at most what makes :data:`_MOST_SEQUENCES` of a generation, or the settings' own.
    """
    if what != "context":
        limit, own = _LIMITS.get(what, 0), size_of(settings, what)
        return max(min(limit, _MOST_SEQUENCES // settings.generation_steps), own)
    return min(_LIMITS[what], positions_of(find_config(settings.model)) or _LIMITS[what])


def end_of_search(base: Settings, what: str, found: Collection[Settings]) -> str | None:
    """Say that some of the largest that were ``found`` are as large as a search goes, and why it ends there.

    Nothing of contexts that are given longer than that: no search made them so.
    """
    most = most_of(base, what)
    if what == "context" and base.sequence_length > most:
        return None
    if what == "speed" or not any(size_of(each, what) > most - _step_of(base, what) for each in found):
        return None
    if what != "context":
        return f"the search ended at {most} {'generations' if what == 'num_generations' else 'in a micro-batch'}"
    why = "the model doesn't support more" if positions_of(find_config(base.model)) == most else "none is longer"
    return f"the search ended at {most} tokens: {why}"


def size_of(settings: TrainerSettings, what: str) -> int:
    """Return how much of ``what`` settings have."""
    if what == "context":
        return settings.sequence_length
    return settings.num_generations if what == "num_generations" else settings.per_device_train_batch_size


def place_of(settings: TrainerSettings, what: str) -> tuple[int, int]:
    """Return what orders the choices of one search: the later is the more wanted, and needs more."""
    if what == "context":
        return settings.per_device_train_batch_size, settings.sequence_length
    return size_of(settings, what), 0


def step_back(settings: Settings, what: str) -> Settings | None:
    """Return choices that need a little less; None where there are none."""
    if what == "speed":
        smaller = halved(settings)
        return smaller if smaller is not None and smaller.sequence_length == settings.sequence_length else None
    if what == "context":
        shorter = int(settings.sequence_length * ENOUGH) // _STEP * _STEP
        return settings.with_(**_to(settings, shorter)) if shorter >= settings.prompt_length + _STEP else None
    step, size = _step_of(settings, what), size_of(settings, what)
    less = min(size - step, int(size * ENOUGH) // step * step)
    if less < (2 if what == "num_generations" else step):
        return None
    changes = {"per_device_train_batch_size": less, **({what: less} if what == "num_generations" else {})}
    return settings.with_(**changes)


def halved(settings: Settings) -> Settings | None:
    """Return settings that need about half: smaller micro-batches first, then shorter completions."""
    size = settings.per_device_train_batch_size
    if size > 1 and size % 2 == 0:
        # The same completions in more, smaller micro-batches make the same step mathematically.
        return settings.with_(
            per_device_train_batch_size=size // 2,
            gradient_accumulation_steps=settings.gradient_accumulation_steps * 2,
            steps_per_generation=settings.generation_steps * 2,
        )
    if settings.completion_length >= 128:
        return settings.with_(completion_length=settings.completion_length // 2)
    return None


def is_number(value: object) -> bool:
    """Tell whether a setting's value is a number, which a switch is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
