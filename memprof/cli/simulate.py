"""``memprof simulate``: a GRPO step executed on tensors without values; no GPU, nothing downloaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memprof.cli.options import format_option, json_option, print_report, save_json, working
from memprof.cli.simulation_options import run_options, settings_of
from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.simulate.fit import Outcome
    from memprof.simulate.lengths import Lengths
    from memprof.simulate.settings import Settings

__all__ = ["command", "need_torch"]


@click.command(name="simulate", short_help="Predict a run's memory without a GPU.")
@run_options
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
@format_option
@json_option
def command(
    config_file: Path | None,
    gpu: str | None,
    device: str,
    output: Path | None,
    completion_lengths: str | None,
    workers: int | None,
    style: str,
    json_file: Path | None,
    **given: Any,
) -> None:
    """Predict the memory of a GRPO run: the installed TRL's own training step, executed on fake tensors through a model
    of CUDA's caching allocator. One warm-up step, then the measured one.

    Exit code 4: it does not fit the GPU named by --gpu.
    """
    settings = settings_of(config_file, given, device=device)
    to_stdout = json_file is not None and str(json_file) == "-"
    if to_stdout and style == "markdown":
        raise UsageError("--json - prints JSON alone on standard output; drop --format markdown or name a file.")
    if gpu is not None and device == "cpu":
        raise UsageError("--gpu asks about a GPU and --device cpu simulates none; drop one of them.")
    need_torch()
    from memprof.simulate.fit import evaluate
    from memprof.simulate.gpus import find_gpu

    card = find_gpu(gpu) if gpu is not None else None
    lengths = _lengths_of(completion_lengths, settings)
    with working(f"Simulating {settings.model}"):
        outcome = evaluate(settings, card)
        if lengths is not None:
            _study(outcome, settings, lengths, gpu, workers)
    report = outcome.analysis.to_dict()
    _save(outcome, output)
    save_json(report, None if to_stdout else json_file)
    print_report(report, "json" if to_stdout else style)
    if outcome.verdict is not None:
        click.echo(outcome.verdict.sentence(), err=True)
        if not outcome.verdict.fits:
            sys.exit(4)


def _lengths_of(text: str | None, settings: Settings) -> Lengths | None:
    if text is None:
        return None
    from memprof.simulate.lengths import read_lengths

    return read_lengths(text, settings.completion_length)


def _study(outcome: Outcome, settings: Settings, lengths: Lengths, gpu: str | None, workers: int | None) -> None:
    """What the lengths do to the peak goes where the verdict is: into the snapshot and all that is made of it."""
    from memprof.plan.runner import runner
    from memprof.simulate.lengths import study
    from memprof.simulate.result import summary_of

    with runner(gpu, workers=workers) as machine:
        found = study(settings, lengths, machine.run, {settings.completion_length: summary_of(outcome)})
    outcome.raw["memprof"]["lengths"] = outcome.analysis.snapshot.extra["lengths"] = found.to_dict()


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
        from memprof.reports.document import document_of
        from memprof.reports.html import write_html

        write_html(document_of(outcome.analysis), output)
        click.echo(f"Page: {output}", err=True)
        return
    from memprof.snapshot import save_snapshot

    save_snapshot(outcome.raw, output)
    click.echo(f"Snapshot: {output}", err=True)
