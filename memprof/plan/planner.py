"""Make a plan: simulate every method, then search the largest configuration that fits and execute it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, fields
from operator import itemgetter

from msgspec.structs import replace

from memprof.config.catalogue import find_config
from memprof.config.fits import kept_for, limit_bytes, stated_error, words_of
from memprof.config.gpus import Gpu, bfloat16_note, find_gpu, older_note
from memprof.config.model_shape import positions_of
from memprof.config.settings import TRAINERS_OWN, Settings, Value
from memprof.config.speeds import speed_of
from memprof.errors import UsageError, did_you_mean
from memprof.executors import ExecutorChoice
from memprof.plan.headline import headline_of_plan
from memprof.plan.methods import methods_for
from memprof.plan.pareto_front import fastest_of, front_of, recommended_of
from memprof.plan.search import ROUNDS, SearchRow, largest_of_each, row_of
from memprof.plan.simulations import SimulatedRow
from memprof.plan.sizes import MAXIMIZE, choices, end_of_search, halved, is_number
from memprof.plan.subprocess_runner import Runner, runner
from memprof.report.plan import Aim, PlanRow
from memprof.report.plan import Plan as PlanAnswer
from memprof.units import amount
from memprof.vocabulary import Category

__all__ = ["AIMS", "MAXIMIZE", "MethodPlan", "SearchRow", "limit_of", "make_plan"]

#: What ``--maximize`` takes: what a search enlarges, or ``speed``, which enlarges nothing.
AIMS: tuple[Aim, ...] = (*MAXIMIZE, "speed")
_ROUNDS = 4
_MOST_RUN = 4  # micro-batches of a step that a search's simulation runs (memprof.simulate.shortcuts.micro_batches)
# Categories that neither a smaller micro-batch nor a shorter completion makes smaller.
_STANDING = (
    Category.WEIGHTS, Category.ADAPTERS, Category.REFERENCE_MODEL, Category.OPTIMIZER_STATE, Category.GRADIENTS
)  # fmt: skip


@dataclass(frozen=True)
class MethodPlan:
    """Hold a plan.

    ``rows`` are the methods or the values of ``--vary``. ``best`` is, of all that were found to fit, the one with the
    most of ``maximized``; of equal ones that which trains the most. ``fastest`` is, by estimated time, the fastest
    that fits of all that do a step's work as it was given; None where none fits or no time is estimated. ``not_given``
    names the settings that nobody gave.
    """

    model: str
    gpu: str
    rows: list[SearchRow]
    best: SearchRow | None
    maximized: Aim
    executed: int
    notes: list[str]
    not_given: tuple[str, ...] = ()

    @property
    def fastest(self) -> SearchRow | None:
        """Return the fastest that fits: of the rows, or with smaller micro-batches where those were searched."""
        return fastest_of(_that_do_the_step(self.rows) if self.maximized == "speed" else self.rows)

    def answer(self) -> PlanAnswer:
        """Return the plan as ``memprof.plan/1``, without code to paste."""
        card = find_gpu(self.gpu)
        found = PlanAnswer(
            model=self.model,
            gpu=self.gpu,
            rows=tuple(_with_front(self.rows, self.maximized == "speed")),
            best=None if self.best is None else self.best.answer(),
            fastest=None if (fastest := self.fastest) is None else fastest.answer(),
            maximized=self.maximized,
            total_bytes=card.total_bytes,
            limit_bytes=max((row.limit_bytes for row in self.rows if row.limit_bytes), default=limit_of(self.gpu)),
            expected_error=stated_error(*(row.settings.known for row in self.rows), card=card),
            notes=tuple(self.notes),
        )
        return replace(found, headline=headline_of_plan(found, self.not_given))


def make_plan(
    base: Settings,
    gpu: str,
    *,
    fixed: set[str] | None = None,
    maximize: str | None = "context",
    vary: tuple[str, list[Value]] | None = None,
    search: bool = True,
    workers: int | None = None,
    use_cache: bool = True,
    progress: Callable[[int, int], None] | None = None,
    executor: Executor | ExecutorChoice | str | None = None,
    on_row: Callable[[SearchRow], None] | None = None,
) -> MethodPlan:
    """Simulate the methods (or one setting's values), and recommend one, or search the best configuration that fits.

    Args:
        base: the settings that the user fixed, and defaults for the rest.
        gpu: a GPU's name or its memory size.
        fixed: names of the settings that the user gave; no method changes them.
        maximize: the setting to enlarge: ``context`` (completion length), ``num_generations`` or ``batch``; or
            ``speed``: the fastest of the methods, with smaller micro-batches where one does not fit as given.
        vary: a setting and the values to compare instead of the methods.
        search: whether to search for the best configuration; else the recommended one is named
            (:func:`memprof.plan.pareto_front.recommended_of`).
        on_row: called with each row when it is simulated.
        workers, use_cache, progress, executor: see :func:`memprof.plan.subprocess_runner.runner`.

    Raises:
        UsageError: a name is not known, or no method agrees with the fixed settings.
        InputError: the model cannot be found or simulated.
    """
    search, aim = search and maximize is not None, next((a for a in AIMS if a == (maximize or "context")), None)
    if aim is None:
        raise UsageError(f"--maximize {maximize!r}: choose from {', '.join(AIMS)}.")
    if aim == "speed":
        _refuse_unknown_speed(gpu)
    given = fixed or set()
    left_out: dict[str, str] = {}
    card = find_gpu(gpu)
    if vary:
        wanted = [(name, _in_half(row, card, {*given, vary[0]})) for name, row in _varied(base, vary, given)]
    else:
        wanted = [(m.name, row) for m, row in methods_for(_in_half(base, card, given), given, left_out)]
    if not wanted:
        why = "no method is left with these settings; leave some of them open."
        raise UsageError(next(iter(left_out.values()), why))
    with runner(gpu, workers=workers, progress=progress, use_cache=use_cache, executor=executor) as machine:
        searched = search and vary is None
        machine.expect(len(wanted) * (1 + ROUNDS) if searched else len(wanted))
        sizes = [choices(settings, aim) for _, settings in wanted] if searched else None

        def done(index: int, result: SimulatedRow) -> None:
            if on_row is not None:
                on_row(row_of(*wanted[index], result))

        results = machine.run([settings for _, settings in wanted], sizes=sizes, done=done)
        rows = [row_of(name, settings, result) for (name, settings), result in zip(wanted, results, strict=True)]
        best = _largest_value(rows, vary[0]) if vary else None
        if searched:
            rows, best = largest_of_each(machine, rows, results, aim)
            if aim == "speed":
                best = fastest_of(_that_do_the_step(rows))
            if best is None and aim not in ("context", "speed"):  # whose searches shrink too
                best = _shrunk(machine, rows)
        elif vary is None:
            best = recommended_of(rows) or _shrunk(machine, rows)
        notes = [*_notes(base, rows, best, aim, card), *_reasons(left_out)]
        if not searched and vary is None and best is not None:
            notes = [*_alternative(rows, best), *notes]
        return MethodPlan(base.model, gpu, rows, best, aim, machine.executed, notes, base.assumed)


def _largest_value(rows: list[SearchRow], name: str) -> SearchRow | None:
    """Return the row that fits with the largest value of a setting; of values in words, the one that needs most."""
    values = [(getattr(row.settings, name), row) for row in rows if row.fits]
    numbers = all(is_number(value) for value, _ in values)
    fitting = [(value if numbers else 0, row.device_peak_bytes, row) for value, row in values]
    return max(fitting, key=itemgetter(0, 1), default=(0, 0, None))[2]


def _in_half(settings: Settings, card: Gpu, fixed: set[str]) -> Settings:
    """Return settings in fp16 for a card before Ampere, where the user asked for no dtype and it can be simulated."""
    sharded = settings.divided
    if sharded or not card.before_ampere or settings.mixed_precision != "bf16" or fixed & {"mixed_precision", "dtype"}:
        return settings
    return settings.with_(mixed_precision="fp16")


def _refuse_unknown_speed(gpu: str) -> None:
    card = find_gpu(gpu)
    if speed_of(card.name) is None:
        raise UsageError(f"--maximize speed needs a known GPU model, e.g. --gpu 4090 (got {gpu}).")


def _that_do_the_step(rows: list[SearchRow]) -> list[SearchRow]:
    """List the rows in their order, in smaller micro-batches where they do not fit as given."""
    return [row.largest if row.largest is not None and not row.fits else row for row in rows]


def _with_front(rows: list[SearchRow], both: bool) -> list[PlanRow]:
    """Return the rows, each with its place on the front; ``both``: the smaller micro-batches' too."""
    smaller = [row.largest for row in rows if both and row.largest is not None and not row.fits]
    front = front_of([*rows, *smaller])
    places = dict(zip([r.method for r in smaller], front[len(rows) :], strict=True))
    found = []
    for row, on in zip(rows, front, strict=False):
        data = replace(row.answer(), on_front=on)
        if both and data.largest is not None:
            data = replace(data, largest=replace(data.largest, on_front=places.get(row.method, on)))
        found.append(data)
    return found


def _varied(base: Settings, vary: tuple[str, list[Value]], fixed: set[str]) -> list[tuple[str, Settings]]:
    name, values = vary
    if name not in (known := [f.name for f in fields(base)]):
        raise UsageError(f"--vary {name}: no such setting{did_you_mean(name, known)}.")
    if name in _NOT_VARIED:
        raise UsageError(f"--vary {name}: {_NOT_VARIED[name]}.")
    out = []
    for value in values:
        given = (value,) if name == "lora_target_modules" else value
        settings = base.with_(**{name: given, **_together(base, name, value, fixed)})
        if settings.supervised:
            raise UsageError(f"--vary {name}={value}: a plan is for GRPO and RLOO; for others ask memprof simulate.")
        out.append((f"{name}={value}", settings))
    return out


# Settings that say nothing of a run on the one card of a plan.
_NOT_VARIED = {
    "gpu": "a plan is for one GPU model; run one plan for each",
    "device": "a plan is for a GPU",
    "left_out": "what it names is not simulated",
    "assumed": "it names what nobody gave",
}


def _together(base: Settings, name: str, value: Value, fixed: set[str]) -> dict[str, Value]:
    """Return what changes with a setting: the micro-batch where TRL would refuse the batch, the sharding of one GPU,
    and a trainer's own defaults that are not ``fixed``.
    """
    if name == "gpus" and value == 1:
        return {"sharding": "ddp"}
    if name == "trainer":
        own = {n: getattr(Settings, n) for defaults in TRAINERS_OWN.values() for n in defaults}
        return {n: v for n, v in {**own, **TRAINERS_OWN.get(str(value), {})}.items() if n not in fixed}
    if name != "num_generations" or not isinstance(value, int) or value < 1:  # refused elsewhere
        return {}
    if (base.per_device_train_batch_size * base.generation_steps * base.replicas) % value:
        return {"per_device_train_batch_size": value}
    return {}


def limit_of(gpu: str) -> int:
    """Return the bytes that a prediction must not exceed on a GPU."""
    return limit_bytes(find_gpu(gpu).total_bytes)


def _shrunk(machine: Runner, rows: list[SearchRow]) -> SearchRow | None:
    """Shrink the leanest method, where none fits as given: smaller micro-batches, then shorter completions."""
    row = min(rows, key=lambda r: r.device_peak_bytes)
    if row.limit_bytes is not None and sum(row.categories.get(name, 0) for name in _STANDING) > row.limit_bytes:
        return None
    settings = row.settings
    for _ in range(_ROUNDS):
        smaller = halved(settings)
        if smaller is None:
            return None
        settings = smaller
        tried = row_of(row.method, settings, machine.run([settings])[0])
        if tried.fits:
            return tried
    return None


def _alternative(rows: list[SearchRow], best: SearchRow) -> list[str]:
    """Say what the lean trainer saves where the recommendation is stock TRL's, in the row that trains alike."""
    alike = [
        row for row in rows
        if row.settings.lean and row.fits and row.settings.load_in_4bit == best.settings.load_in_4bit
        and row.settings.has_adapter == best.settings.has_adapter
    ]  # fmt: skip
    if best.settings.lean or not alike:
        return []
    row = min(alike, key=lambda row: row.device_peak_bytes)
    less = best.device_peak_bytes - row.device_peak_bytes
    if less <= 0:
        return []
    slower = f", at {row.step_s / best.step_s:.1f} times the estimated time" if row.step_s and best.step_s else ""
    return [f"alternative: {row.method} needs {amount(less)} less{slower}"]


def _kept(rows: list[SearchRow], card: Gpu) -> list[str]:
    """Say how much room was kept for what is not known, and in which rows."""
    kept: dict[str, list[str]] = {}
    for row in rows:
        kept.setdefault(words_of(kept_for(row.settings.known, card)), []).append(row.method)
    return [f"{words} ({', '.join(methods) if len(kept) > 1 else 'every row'})" for words, methods in kept.items()]


def _reasons(left_out: dict[str, str]) -> list[str]:
    """Say which methods were left out, once for each reason."""
    names = {why: [name for name, said in left_out.items() if said == why] for why in left_out.values()}
    return [f"left out: {', '.join(methods)} ({why})" for why, methods in names.items()]


def _notes(base: Settings, rows: list[SearchRow], best: SearchRow | None, maximized: str, card: Gpu) -> list[str]:
    notes = ["the step was executed on fake tensors; reserved memory came from a model of CUDA's caching allocator"]
    if base.generation == "hf" and not base.supervised:
        notes.append(
            "of a generation the first and the last tokens were run; memprof simulate repeats each, and says how often "
            "the allocator has to give memory back"
        )
    found = [row.settings for row in (*rows, *(row.largest for row in rows if row.largest is not None))]
    if any(settings.gradient_accumulation_steps > _MOST_RUN for settings in found):
        notes.append(f"of a step's micro-batches the first {_MOST_RUN - 1} and the last were run, and all were counted")
    if card.before_ampere and base.mixed_precision == "bf16" and any(s.mixed_precision == "fp16" for s in found):
        notes.append(
            "this GPU has no bfloat16 units: rows are in fp16, with a loss scaler; --dtype bfloat16 uses bfloat16"
        )
    notes += dict.fromkeys(note for settings in found if (note := bfloat16_note(card, settings.known)) is not None)
    notes += [note for note in (older_note(card),) if note is not None]
    notes += _kept(rows, card)
    if base.load_in_4bit or (best is not None and best.settings.load_in_4bit):
        notes.append("4-bit layers are modelled after bitsandbytes, not executed")
    reach, longest = positions_of(find_config(base.model)), max(row.settings.sequence_length for row in rows)
    if reach is not None and longest > reach:
        notes.append(f"sequences of {longest:,} tokens are longer than this model's positions reach ({reach:,} tokens)")
    if (ended := end_of_search(base, maximized, [row.largest.settings for row in rows if row.largest])) is not None:
        notes.append(ended)
    return notes
