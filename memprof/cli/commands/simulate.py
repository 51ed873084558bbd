"""``memprof simulate``: a GRPO step executed on tensors without values; no GPU, nothing downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memprof.cli.options import end_with_verdict, format_option, json_option, print_report, save_json, working
from memprof.cli.simulation_options import budget_option, run_options, settings_of
from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.config.settings import Settings
    from memprof.simulate.fit import Outcome

__all__ = ["command", "need_torch"]


@click.command(name="simulate", short_help="Predict a run's memory without a GPU.")
@run_options
@budget_option
@click.option("--gpu", metavar="NAME|SIZE", help="Say whether it fits: a name such as H100, or a size such as 24GB.")
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    show_default=True,
    help="Whose code paths to follow.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Snapshot (.pickle) or page (.html)."
)
@click.option(
    "--completion-lengths",
    metavar="FILE|MEAN:SD|N,N,...",
    help="Lengths completions really have: a file of numbers, a recorded snapshot, or a distribution. Says which share "
    "of the steps fits.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Processes for the lengths; default: one a core."
)
@click.option(
    "--script",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Run this training script up to its trainer.train(), and simulate that; its own arguments follow --.",
)
@click.option(
    "--like",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Start from a recorded run's own configuration: a snapshot, the callback's folder or a report's JSON.",
)
@click.option("--set", "assignments", multiple=True, metavar="NAME=VALUE", help="With --like: what to change.")
@format_option
@json_option
@click.argument("script_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- SCRIPT ARGUMENTS]")
def command(
    config_file: Path | None,
    memory_budget: str | None,
    gpu: str | None,
    device: str,
    output: Path | None,
    completion_lengths: str | None,
    workers: int | None,
    script: Path | None,
    script_arguments: tuple[str, ...],
    like: Path | None,
    assignments: tuple[str, ...],
    style: str,
    json_file: Path | None,
    **given: Any,
) -> None:
    """Predict the memory of a GRPO run: the installed TRL's own training step, executed on fake tensors through a model
    of CUDA's caching allocator. One warm-up step, then the measured one.

    Exit code 4: it does not fit the GPU named by --gpu.
    """
    to_stdout = json_file is not None and str(json_file) == "-"
    if to_stdout and style == "markdown":
        raise UsageError("--json - prints JSON alone on standard output; drop --format markdown or name a file.")
    if assignments and like is None:
        raise UsageError("--set changes a recorded run: say which one with --like.")
    if memory_budget is not None and (like is not None or script is not None):
        raise UsageError("--memory-budget chooses for settings given here; drop --like and --script.")
    if like is not None:
        _what_if(like, assignments, config_file, given, script, completion_lengths, gpu, output, style, json_file)
        return
    if gpu is not None and device == "cpu":
        raise UsageError("--gpu asks about a GPU and --device cpu simulates none; drop one of them.")
    if script_arguments and script is None:
        raise UsageError(f"{script_arguments[0]!r}: arguments of a script need --script FILE.")
    run: _Run
    if script is not None:
        run = _ScriptRun(script, script_arguments, config_file, given, device, gpu)
    else:
        settings = settings_of(config_file, given, device=device)
        if memory_budget is not None:
            need_torch()
            settings, gpu = _within(settings, memory_budget, gpu, config_file, given, workers)
        run = _Run(settings, gpu)
    outcome = run.outcome(completion_lengths, workers)
    report = outcome.analysis.to_dict()
    _save(outcome, output)
    save_json(report, None if to_stdout else json_file)
    print_report(report, "json" if to_stdout else style)
    end_with_verdict(outcome.verdict)


def _within(
    settings: Settings,
    budget: str,
    gpu: str | None,
    config_file: Path | None,
    given: dict[str, Any],
    workers: int | None,
) -> tuple[Settings, str | None]:
    """The settings chosen for a budget, said on stderr; and what the run is judged on."""
    from memprof.config.gpus import find_gpu
    from memprof.config.settings import read_settings
    from memprof.plan.ladder import CHOSEN, choose, sentences
    from memprof.plan.subprocess_runner import runner

    if budget.strip().lower() == "auto" and gpu is None:
        raise UsageError("--memory-budget auto is a card's memory: say which one with --gpu.")
    if settings.device == "cpu":
        raise UsageError("--memory-budget is a GPU's; drop --device cpu.")
    card = gpu if budget.strip().lower() == "auto" else budget
    total = find_gpu(str(card)).total_bytes
    known = {**(read_settings(config_file) if config_file is not None else {}), **_given(given)}
    with working(f"Choosing settings for {settings.model}"), runner(card, workers=workers) as machine:
        choice = choose(settings, total, machine.run, [name for name in CHOSEN if known.get(name) is not None])
    click.echo(sentences(choice), err=True)
    return choice.settings, gpu or card


def _what_if(
    like: Path,
    assignments: tuple[str, ...],
    config_file: Path | None,
    given: dict[str, Any],
    script: Path | None,
    completion_lengths: str | None,
    gpu: str | None,
    output: Path | None,
    style: str,
    json_file: Path | None,
) -> None:
    """A recorded run, unchanged and changed, beside what was measured."""
    from memprof.cli.commands.whatif import changes_of, simulate_like
    from memprof.config.settings import read_settings

    if script is not None or completion_lengths is not None:
        raise UsageError("--like takes everything from a recording; drop --script and --completion-lengths.")
    need_torch()
    options = {**(read_settings(config_file) if config_file is not None else {}), **_given(given)}
    simulate_like(like, changes_of(assignments, options), gpu, output, style, json_file)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


class _Run:
    """Settings to simulate, and the GPU they are asked about."""

    def __init__(self, settings: Settings, gpu: str | None) -> None:
        need_torch()
        from memprof.config.gpus import find_gpu

        self.settings, self.gpu = settings, gpu
        self.card = find_gpu(gpu) if gpu is not None else None
        self.label = settings.model

    def outcome(self, completion_lengths: str | None, workers: int | None) -> Outcome:
        """Simulated, judged, and studied over lengths where they are given."""
        from memprof.simulate.fit import summary_of
        from memprof.simulate.lengths import read_lengths, study

        longest = self.settings.completion_length
        lengths = read_lengths(completion_lengths, longest) if completion_lengths is not None else None
        with working(f"Simulating {self.label}"):
            outcome = self.judged()
            if lengths is not None:
                settings = self.settings
                known = {settings.completion_length: summary_of(outcome)}
                found = study(settings, lengths, lambda wanted: self.rows(wanted, workers), known).to_dict()
                # Where the verdict is: in the snapshot, and in all that is made of it.
                outcome.raw["memprof"]["lengths"] = outcome.analysis.snapshot.extra["lengths"] = found
        return outcome

    def judged(self) -> Outcome:
        """Simulated once, and once more where only cached memory is too much."""
        from memprof.simulate.fit import evaluate

        return evaluate(self.settings, self.card)

    def rows(self, wanted: list[Settings], workers: int | None) -> list[dict[str, Any]]:
        """More of the same at other lengths, in parallel, and remembered."""
        from memprof.plan.subprocess_runner import runner

        with runner(self.gpu, workers=workers) as machine:
            return machine.run(wanted)


class _ScriptRun(_Run):
    """A training script, whose trainer is simulated instead of trained."""

    def __init__(
        self,
        script: Path,
        arguments: tuple[str, ...],
        config_file: Path | None,
        given: dict[str, Any],
        device: str,
        gpu: str | None,
    ) -> None:
        from memprof.config.settings import Settings

        self.changes = _changes_of(config_file, given)
        super().__init__(Settings(model=script.name, device=device), gpu)
        self.script, self.arguments, self.device = script, arguments, device

    def outcome(self, completion_lengths: str | None, workers: int | None) -> Outcome:
        if completion_lengths is None:
            return super().outcome(None, workers)
        # How long completions may be is known only when the script has run.
        outcome = self.judged()
        config = outcome.analysis.snapshot.extra.get("config") or {}
        if "num_generations" not in config:
            raise UsageError("--completion-lengths is for GRPO; this script trains with another trainer.")
        names = ("completion_length", "per_device_train_batch_size", "gradient_accumulation_steps")
        self.settings = self.settings.with_(
            **{name: config[name] for name in (*names, "steps_per_generation", "num_generations")}
        )
        self.judged = lambda: outcome  # type: ignore[method-assign]
        return super().outcome(completion_lengths, workers)

    def judged(self) -> Outcome:
        return self._simulated(self.changes)

    def rows(self, wanted: list[Settings], workers: int | None) -> list[dict[str, Any]]:
        from memprof.simulate.fit import summary_of

        lengths = [settings.completion_length for settings in wanted]
        return [summary_of(self._simulated({**self.changes, "completion_length": length})) for length in lengths]

    def _simulated(self, changes: dict[str, Any]) -> Outcome:
        from memprof.simulate.fit import judge
        from memprof.simulate.trainer.script import simulate_script

        def once(capacity: int | None) -> dict[str, Any]:
            return simulate_script(
                self.script, self.arguments, changes, device=self.device, capacity=capacity, gpu=self.card
            )

        return judge(once, self.card)


def _changes_of(config_file: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """The settings that replace a script's own; what only the script can say is refused."""
    from memprof.config.from_trainer import CHANGEABLE
    from memprof.config.settings import read_settings

    values = read_settings(config_file) if config_file is not None else {}
    values.update({name: value for name, value in given.items() if value is not None})
    for name in values:
        if name not in CHANGEABLE:
            raise UsageError(f"--{name.replace('_', '-')} is the script's own to say; leave it out with --script.")
    return values


def need_torch() -> None:
    """Refuse, in one sentence, where what is to be executed is not installed."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers", "trl", "peft") if find_spec(name) is None]
    if missing:
        raise UsageError(f"simulating needs {', '.join(missing)}: pip install 'grpo-memprof[trl]'.")


def _save(outcome: Any, output: Path | None) -> None:
    if output is None:
        return
    if output.suffix == ".html":
        from memprof.reports.document.build import document_of
        from memprof.reports.html.page import write_html

        write_html(document_of(outcome.analysis), output)
        click.echo(f"Page: {output}", err=True)
        return
    from memprof.snapshot import save_snapshot

    save_snapshot(outcome.raw, output)
    click.echo(f"Snapshot: {output}", err=True)
