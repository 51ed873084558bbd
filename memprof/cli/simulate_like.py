"""Simulate a recorded run as it was and with something changed: ``memprof simulate --like RUN --set NAME=VALUE``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memprof.cli.answers import compared_document, comparison_answer
from memprof.cli.emit import Output
from memprof.cli.inputs import GivenRun, read_run
from memprof.cli.progress import working
from memprof.cli.simulating import emit_simulated
from memprof.cli.simulation_options import names_of, refuse_unsimulated, value_of
from memprof.cli.unused_options import refuse_unused
from memprof.errors import InputError, UsageError, did_you_mean
from memprof.report.advice import Unchanged
from memprof.report.codec import to_builtins
from memprof.report.comparison import Comparison
from memprof.vocabulary import Kind

if TYPE_CHECKING:
    from memprof.config.gpus import Gpu
    from memprof.config.settings import Settings, Value
    from memprof.reports.document.model import Document
    from memprof.simulate.evaluate import Outcome

# Settings that "none" switches off.
_OPTIONAL = {"lora_r", "steps_per_generation", "reward_model"}
# The compute capability that is assumed where no card is named.
_GENERATION = (9, 0)


def simulate_like(
    like: Path, changes: Mapping[str, Value], gpu: str | None, output: Output, allow_unsimulated: bool = False
) -> None:
    """Simulate the run at ``like`` unchanged and with ``changes``, and put measured and simulated side by side."""
    from memprof.analysis.headline import headline_of_comparison
    from memprof.config.from_recording import place_model, ran_on, settings_like
    from memprof.config.gpus import find_gpu
    from memprof.plan.cache import cache_folder
    card = find_gpu(gpu) if gpu is not None else None
    given = read_run(like)
    source, kind = to_builtins(given.report.source), given.report.source.kind
    try:
        likeness = settings_like(source)
    except InputError as error:
        raise InputError(f"{given.path}: {error}.") from None
    settings = place_model(likeness, cache_folder() / "models")
    changed = _changed(settings, changes)
    refuse_unsimulated(changed, allow_unsimulated)
    if card is not None and changed.device == "cpu":
        raise UsageError("this run was recorded on a CPU; to ask whether it fits a GPU, add --set device=cuda.")
    same = changed == settings
    here = ran_on(source, settings)
    its_own = _the_card(here) if here is not None else None
    measured = kind != Kind.SIMULATED
    # A simulation for another card, or for none, also differs by the card.
    elsewhere = not measured and card is not None and given.report.source.device_total_bytes != card.total_bytes
    unchanged = None
    if measured or same or elsewhere:
        unchanged = _evaluated("as it was", settings, card, its_own)
    outcome = unchanged if same else _evaluated(_named(changes), changed, card, its_own)
    assert outcome is not None
    page = output.page is not None and output.page.suffix == ".html"
    first = None if elsewhere and not same else given
    answer, documents = _compared(first, unchanged, None if same else outcome, changes, page)
    headline = replace(answer.headline or headline_of_comparison(answer), assumed=tuple(likeness.words(changed)))
    answer = replace(answer, unchanged=_unchanged(given, unchanged, likeness.words()), headline=headline)
    emit_simulated(comparison_answer(answer, documents), outcome, output)


def _the_card(here: str) -> Gpu:
    """Return the card of the recorded run; take one known by its size alone for a recent one."""
    from memprof.config.gpus import find_gpu, known_gpus

    card = find_gpu(here)
    return card if card in known_gpus() else dataclasses.replace(card, capability=_GENERATION)


def changes_of(assignments: tuple[str, ...], options: Mapping[str, Value]) -> dict[str, Value]:
    """Collect settings by name, from ``--set``, which wins, and from the command's other options; UsageError for a name
    that is no setting."""
    from memprof.config.settings import ALIASES, Settings

    known = [f.name for f in fields(Settings)]
    found: dict[str, Value] = {name: value for name, value in options.items() if value is not None}
    for text in assignments:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        name = ALIASES.get(name, name)
        if not equals or name not in known:
            raise UsageError(
                f"--set {text!r}: write NAME=VALUE with the name of a setting{did_you_mean(name, known, 3)}."
            )
        found[name] = (
            None if value.strip().lower() in ("none", "null", "") and name in _OPTIONAL else value_of(value.strip())
        )
    for name in ("lora_target_modules", "modules_to_save"):
        if isinstance(listed := found.get(name), str):
            found[name] = names_of(listed)
    return found


def _changed(settings: Settings, changes: Mapping[str, Value]) -> Settings:
    try:
        changed = settings.with_(**changes)
    except TypeError as error:
        raise UsageError(f"a setting has a value of the wrong kind ({error}).") from None
    refuse_unused(changed, changes)
    return changed


def _evaluated(what: str, settings: Settings, card: Gpu | None, its_own: Gpu | None) -> Outcome:
    """Simulate on the card of ``--gpu``, else on the recorded one where the simulation needs to know it."""
    from memprof.advice.estimate import estimated_advice
    from memprof.simulate.evaluate import evaluate, judge
    from memprof.simulate.run import simulate_settings

    with working(f"Simulating the run {what}"):
        if card is None and its_own is not None:
            return judge(lambda room: simulate_settings(settings, gpu=its_own, capacity=room), None, estimated_advice)
        return evaluate(settings, card, advisor=estimated_advice)


def _named(changes: Mapping[str, Value]) -> str:
    return "with " + ", ".join(f"{name}={_plain(value)}" for name, value in changes.items())


def _plain(value: Value) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _compared(
    given: GivenRun | None, unchanged: Outcome | None, changed: Outcome | None, changes: Mapping[str, Value], page: bool
) -> tuple[Comparison, list[Document | None]]:
    """Compare what was recorded, if it is given, with what was simulated; returns the comparison and each run's
    document.
    """
    from memprof.analysis.allocations.differences import holdings_of_report
    from memprof.analysis.allocations.holdings import holdings_of_analysis
    from memprof.analysis.compare import ComparisonColumn, badge_of, compare

    runs: list[ComparisonColumn] = []
    documents: list[Document | None] = []
    if given is not None:
        report = given.report
        held = holdings_of_analysis(given.analysis) if given.analysis is not None else holdings_of_report(report)
        word = badge_of(report)
        runs.append(ComparisonColumn(word if word == "measured" else "as it was", word, report, held=held))
        documents.append(compared_document(given.analysis, page))
    for label, outcome in (("as it was", unchanged), (_named(changes), changed)):
        if outcome is None:
            continue
        analysis = outcome.analysis
        runs.append(ComparisonColumn(label, "simulated", analysis.report, held=holdings_of_analysis(analysis)))
        documents.append(compared_document(analysis, page))
    return compare(runs), documents


def _unchanged(given: GivenRun, unchanged: Outcome | None, assumed: list[str]) -> Unchanged | None:
    """Say how far off the simulator is on the measured run; return nothing for a simulated one."""
    if unchanged is None or given.report.source.kind == Kind.SIMULATED:
        return None
    return Unchanged(
        measured_bytes=given.report.peak.allocated_bytes,
        simulated_bytes=unchanged.analysis.peak.allocated_bytes,
        assumed=tuple(assumed),
    )
