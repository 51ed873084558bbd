"""``memprof report``: one snapshot, or the ranks of one run, as a table, a JSON file or a page."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from memprof.analysis.headline import with_headline
from memprof.cli.advising import check_card, estimated, fits_asked_card, simulated
from memprof.cli.answers import redacted, report_answer
from memprof.cli.emit import Output, emit, output_options
from memprof.cli.inputs import GivenRun, analysed, known_report, read_ranks
from memprof.cli.options import device_option, redact_option, rules_option, seconds_option
from memprof.config.gpus import capacity_bytes
from memprof.errors import UsageError

__all__ = ["command"]


@click.command(name="report")
@click.argument("snapshots", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="SNAPSHOT...")
@output_options("report", page="Write the HTML page to FILE.html.")
@device_option
@click.option(
    "--step", type=click.IntRange(min=0), metavar="N",
    help="Report this step of a folder; default: the newest that most ranks recorded.",
)  # fmt: skip
@click.option(
    "--capacity", metavar="NAME|SIZE",
    help="Say how far the run was from out of memory on this card, such as 4090 or 24GB; default: the card it ran on.",
)  # fmt: skip
@click.option(
    "--role", metavar="NAME", help="Report this role of a folder (actor, reference, ...); default: who trains."
)
@click.option("--allocations", default="50", metavar="N|all", help="List the N largest allocations; default: 50.")
@click.option("--advise", is_flag=True, help="Simulate the run with each change that could lower its peak.")
@click.option("--gpu", metavar="NAME|SIZE", help="With --advise: find the changes that make the run fit this card.")
@seconds_option
@rules_option
@redact_option
def command(
    snapshots: tuple[Path, ...],
    output: Output,
    device: int | None,
    step: int | None,
    role: str | None,
    capacity: str | None,
    allocations: str,
    advise: bool,
    gpu: str | None,
    seconds: float,
    rules: Path | None,
    redact: bool,
) -> None:
    """Show where the memory of SNAPSHOT went: what for, in which phase, and how that is known.

    SNAPSHOT is a file from memprof or from torch.cuda.memory._dump_snapshot: a pickle (gzip'd or not) or JSON. memprof
    executes nothing in it. A report's JSON is read too; it has no timeline. Give several of either, or the folder of a
    run, to report the ranks of one run: memprof shows the fullest, puts all side by side and names those that are
    missing. A folder may be one that verl, slime, prime-rl, torchtitan or another framework wrote, with folders for
    steps and dumps of several roles: the page lists every dump, and --step and --role choose which are shown.

    The report estimates from recorded sizes what would lower the peak. With --advise it simulates each change instead,
    which needs TRL and takes minutes. Exit code 4: no changes were found that make the run fit --gpu.
    """
    _check_advice(advise, gpu)
    card = None if capacity is None else {"bytes": capacity_bytes(capacity), "from": "option"}
    run = _read(snapshots, step, role, device, rules, _how_many(allocations))
    report = simulated(estimated(run.report), gpu, seconds) if advise else run.report
    report = report if card is None else with_headline({**report, "capacity": card})
    kind = "report_and_changes" if advise else "report"
    answer = report_answer(kind, redacted(report, redact), run.analysis, redact=redact)
    emit(answer, output, fits=fits_asked_card(report))


def _check_advice(advise: bool, gpu: str | None) -> None:
    if not advise:
        if gpu is not None:
            raise UsageError("--gpu asks which changes make the run fit a card: add --advise.")
        if click.get_current_context().get_parameter_source("seconds") is ParameterSource.COMMANDLINE:
            raise UsageError("--seconds is for simulating: add --advise.")
        return
    check_card(gpu)
    from memprof.cli.simulating import need_torch

    try:
        need_torch()
    except UsageError as error:
        raise UsageError(f"--advise simulates: {error} Without --advise a report has estimates.") from None


def _how_many(allocations: str) -> int | None:
    if allocations == "all":
        return None
    if not allocations.isdecimal():
        raise UsageError(f"--allocations {allocations!r} is neither a number nor 'all'.")
    return int(allocations)


def _read(
    snapshots: tuple[Path, ...],
    step: int | None,
    role: str | None,
    device: int | None,
    rules: Path | None,
    listed: int | None,
) -> GivenRun:
    if role is not None and not (len(snapshots) == 1 and snapshots[0].is_dir()):
        raise UsageError("--role chooses among the dumps of a folder; give one folder.")
    if len(snapshots) > 1 or snapshots[0].is_dir():
        return read_ranks(snapshots, step, device, rules, listed, role)
    if step is not None:
        raise UsageError("--step chooses among the recordings of a folder; this is one file.")
    report = known_report(snapshots[0])
    if report is not None:
        if device is not None or rules is not None:
            raise UsageError("--device and --rules need the snapshot; this is a report's JSON.")
        return GivenRun(snapshots[0], report, None)
    analysis = analysed(snapshots[0], device, rules)
    return GivenRun(snapshots[0], analysis.to_dict(listed), analysis)
