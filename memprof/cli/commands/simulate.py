"""``memprof simulate``: a run's memory predicted by running its step on fake (shape-only) tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memprof.cli.answers import report_answer
from memprof.cli.emit import Output, output_options
from memprof.cli.group import OWN_PROCESS
from memprof.cli.option_groups import grouped
from memprof.cli.options import RECORDING, executor_option
from memprof.cli.progress import working
from memprof.cli.simulating import SettingsRun, SimulatedScript, emit_simulated, need_torch
from memprof.cli.simulation_options import (
    GROUPS,
    INSTEAD,
    OTHER_NAMES,
    budget_option,
    given_settings,
    run_options,
    settings_of,
    with_gpu_count,
)
from memprof.cli.unused_options import refuse_unused
from memprof.errors import UsageError
from memprof.simulate.fast_start import take_process
from memprof.simulate.shortcut_switches import SHORTCUTS, without

if TYPE_CHECKING:
    from memprof.config.settings import Settings, Value
    from memprof.executors import ExecutorChoice

# Endings of files that are neither a page nor a snapshot.
_NEITHER = (".csv", ".htm", ".json", ".md", ".pdf", ".png", ".svg", ".txt", ".yaml")


@click.command(name="simulate", cls=grouped(GROUPS, aliases=OTHER_NAMES, advice=INSTEAD))
@run_options
@budget_option
@click.option("--gpu", metavar="NAME|SIZE", help="Check whether the run fits this GPU, such as H100 or 24GB.")
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True,
    help="Follow the code paths of this device.",
)  # fmt: skip
@output_options("simulate", page="Write a snapshot (.pickle) or a page (.html).")
@click.option(
    "--completion-lengths", metavar="FILE|MEAN:SD|N,N,...",
    help="Say which share of the steps fits, from the lengths completions really have: a file of numbers, a recorded "
    "snapshot, or a distribution.",
)  # fmt: skip
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N",
    help="Simulate lengths, or what --memory-budget tries, in N processes; default: one a core.",
)  # fmt: skip
@click.option("--no-shortcuts", is_flag=True, help="Execute everything, also what repeats: slow, and the same bytes.")
@executor_option
@click.option(
    "--script", type=click.Path(path_type=Path), metavar="FILE",
    help="Run this training script up to its trainer.train() and simulate that; put its arguments after --.",
)  # fmt: skip
@click.option(
    "--like", type=RECORDING, metavar="RUN",
    help="Start from the settings of a recorded run: a snapshot, folder or report's JSON.",
)  # fmt: skip
@click.option("--set", "assignments", multiple=True, metavar="NAME=VALUE", help="With --like: change a setting.")
@click.argument("script_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[MODEL | -- SCRIPT ARGUMENTS]")
def command(
    config_file: Path | None,
    memory_budget: str | None,
    gpu: str | None,
    device: str,
    output: Output,
    completion_lengths: str | None,
    workers: int | None,
    no_shortcuts: bool,
    executor: ExecutorChoice | None,
    script: Path | None,
    script_arguments: tuple[str, ...],
    like: Path | None,
    assignments: tuple[str, ...],
    **given: Any,
) -> None:
    """Predict a run's memory without a GPU: run TRL's own training step on fake (shape-only) tensors through a model of
    CUDA's caching allocator. Nothing is downloaded. A warm-up step runs before the measured one.

    Exit code 4: the run does not fit the GPU named by --gpu.
    """
    if click.get_current_context().obj == OWN_PROCESS:
        take_process()
    if len(script_arguments) == 1 and script is None and like is None and given.get("model") is None:
        given, script_arguments = {**given, "model": script_arguments[0]}, ()
    if output.page is not None and output.page.suffix.lower() in _NEITHER:
        raise UsageError(f"-o {output.page}: give a name that ends in .html (page) or .pickle (snapshot).")
    if no_shortcuts:
        if completion_lengths is not None or memory_budget is not None:
            raise UsageError("--no-shortcuts executes one run: drop --completion-lengths and --memory-budget.")
        click.get_current_context().with_resource(without(*SHORTCUTS))
    if assignments and like is None:
        raise UsageError("--set changes a recorded run: name it with --like.")
    shared = f"--workers {workers}" if workers is not None else None
    shared = f"--executor {executor}" if executor is not None else shared
    if shared is not None and completion_lengths is None and memory_budget is None:
        raise UsageError(f"{shared} shares out several simulations: add --completion-lengths or --memory-budget.")
    if shared is not None and script is not None:
        raise UsageError(f"{shared} does nothing with --script: a script runs in this process; drop it.")
    if memory_budget is not None and (like is not None or script is not None):
        raise UsageError("--memory-budget chooses for settings given here; drop --like and --script.")
    gpu, given = with_gpu_count(gpu or given_settings(config_file, given).get("gpu"), config_file, given)
    if like is not None:
        if script is not None or completion_lengths is not None:
            raise UsageError("--like can't be combined with --script or --completion-lengths.")
        need_torch()
        from memprof.cli.simulate_like import changes_of, simulate_like

        changed = changes_of(assignments, given_settings(config_file, given))
        simulate_like(like, changed, gpu, output, bool(given.get("allow_unsimulated")))
        return
    if gpu is not None and device == "cpu":
        raise UsageError("--gpu and --device cpu exclude each other; drop one of them.")
    if script_arguments and script is None:
        raise UsageError(f"{script_arguments[0]!r}: arguments of a script need --script FILE.")
    run: SettingsRun
    if script is not None:
        changes = _changes_of(given_settings(config_file, given))
        _refuse_unused_of_script(changes, device)
        run = SimulatedScript(script, script_arguments, changes, device, gpu, bool(given.get("allow_unsimulated")))
    else:
        settings = settings_of(config_file, given, device=device)
        if memory_budget is not None:
            need_torch()
            settings, gpu = _within(settings, memory_budget, gpu, given_settings(config_file, given), workers, executor)
        run = SettingsRun(settings, gpu)
    with working(f"Simulating {run.label}"):
        outcome = run.outcome(completion_lengths, workers, executor)
    emit_simulated(report_answer("simulate", outcome.analysis.report, outcome.analysis), outcome, output)


def _changes_of(values: dict[str, Value]) -> dict[str, Value]:
    """Keep the settings that replace a script's own; refuse what only the script can say."""
    from memprof.config.from_trainer import CHANGEABLE

    for name in ("unknown", "left_out"):  # of a file, which has more than the settings to change
        values.pop(name, None)
    for name in values:
        if name not in CHANGEABLE:
            raise UsageError(f"--{name.replace('_', '-')} is set by the script; drop it with --script.")
    return values


def _refuse_unused_of_script(changes: Mapping[str, Value], device: str) -> None:
    """Refuse CUDA-only options on a CPU; the others depend on the script's settings, which are not known yet."""
    from memprof.config.settings import Settings

    asked = {name: changes.get(name) for name in ("alloc_conf", "attn")}
    refuse_unused(Settings(model="of a script", device=device), asked)


def _within(
    settings: Settings,
    budget: str,
    gpu: str | None,
    known: Mapping[str, Value],
    workers: int | None,
    executor: ExecutorChoice | None,
) -> tuple[Settings, str | None]:
    """Choose settings for a budget and print them on stderr; return them and the card to judge the run on."""
    from memprof.config.gpus import find_gpu
    from memprof.plan.budget_search import CHOSEN, choose, sentences
    from memprof.plan.subprocess_runner import runner

    if budget.strip().lower() == "auto" and gpu is None:
        raise UsageError("--memory-budget auto requires --gpu.")
    if settings.device == "cpu":
        raise UsageError("--memory-budget is a GPU's; drop --device cpu.")
    auto = budget.strip().lower() == "auto"
    card = find_gpu(str(gpu or budget))
    if gpu is not None and not auto:  # that card, with the budget as its memory
        card = replace(card, total_bytes=find_gpu(budget).total_bytes)
    fixed = [name for name in CHOSEN if known.get(name) is not None]
    opened = runner(card, workers=workers, executor=executor)
    with working(f"Choosing settings for {settings.model}"), opened as machine:
        choice = choose(settings, card.total_bytes, machine.run, fixed, together=machine.workers)
    click.echo(sentences(choice), err=True)
    return choice.settings, gpu or budget
