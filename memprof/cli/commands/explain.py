"""``memprof explain``: each allocation alive at one instant, and how its category is known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memprof.cli.answers import redacted_parts
from memprof.cli.emit import Output, emit, output_options
from memprof.cli.inputs import analysed
from memprof.cli.options import RECORDING, device_option, redact_option, rules_option, snapshot_option
from memprof.errors import UsageError
from memprof.reports.renderers import Answer

if TYPE_CHECKING:
    from memprof.report.allocations import Allocation, AllocationGroup

_DEFAULT_TOP = 20


@click.command(name="explain")
@click.argument("snapshot", type=RECORDING)
@click.option(
    "--at", default="peak", metavar="peak|device-peak|phase:NAME|TIME_US",
    help="Choose the instant: the allocated peak (default), the device peak, a phase's peak, or a time in the "
    "recording.",
)  # fmt: skip
@click.option("--category", metavar="NAME", help="List this category only.")
@click.option(
    "--address", metavar="ADDRESS", help="Show only the allocation that contains this address (0x... or decimal)."
)
@click.option("--top", type=click.IntRange(min=1), metavar="N", help=f"List the N largest; default: {_DEFAULT_TOP}.")
@click.option("--all", "everything", is_flag=True, help="List every one.")
@click.option(
    "--full-stacks", is_flag=True, help="Show whole stacks, with the frames of torch, C++, Python, click and memprof."
)
@device_option
@snapshot_option
@output_options("explain")
@rules_option
@redact_option
def command(
    snapshot: Path,
    at: str,
    category: str | None,
    address: str | None,
    top: int | None,
    everything: bool,
    full_stacks: bool,
    device: int | None,
    number: int | None,
    output: Output,
    rules: Path | None,
    redact: bool,
) -> None:
    """List the allocations of SNAPSHOT alive at one instant, alike ones folded, the largest sum first.

    Show each one's bytes, category, evidence with its rule, alternatives, phase, lifetime and stack. The JSON lists
    them one by one.
    """
    if everything and top is not None:
        raise UsageError("--all and --top exclude each other; give one.")
    where = _address(address)
    analysis = analysed(snapshot, device, rules, number)
    most = None if everything else top or _DEFAULT_TOP
    groups = redacted_parts(analysis.largest(most, at, category, where), redact, analysis)
    listed = analysis.explain(at, category, most, where) if output.wants_json else ()
    singles = redacted_parts(listed, redact, analysis)
    _emit(groups, singles, at, output, full_stacks, analysis.timed)


def _address(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return int(text, 0)
    except ValueError:
        raise UsageError(f"--address {text!r} is no address; write it like 0x7f0000000000 or in decimal.") from None


def _emit(
    groups: Sequence[AllocationGroup],
    singles: tuple[Allocation, ...],
    at: str,
    output: Output,
    full_stacks: bool,
    timed: bool,
) -> None:
    from memprof.report.report import Explanation
    from memprof.reports.document.tables import allocation_rows, brief_stack
    from memprof.units import format_bytes

    blocks, whole = sum(group.count for group in groups), sum(group.bytes for group in groups)
    many = f"{blocks} allocation{'' if blocks == 1 else 's'}"
    lines = f" on {len(groups)} line{'' if len(groups) == 1 else 's'}" if blocks > len(groups) else ""
    caption = f"{many}{lines}, {format_bytes(whole)}, alive at {at}, largest first"
    shorten = None if full_stacks else brief_stack
    rows = partial(allocation_rows, groups, whole, shorten, timed=timed)
    emit(Answer("explain", Explanation(allocations=singles), rows, caption=caption), output)
