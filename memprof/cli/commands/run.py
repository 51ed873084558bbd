"""``memprof run``: any training script with the callback attached, without editing it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from memprof.cli.options import check_folder, redact_option
from memprof.errors import UsageError
from memprof.units import parse_size


class _Steps(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Steps written as ``2`` or ``2,10,500``."""

    name = "steps"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        parts = str(value).split(",")
        if not all(part.strip().isdecimal() and int(part) for part in parts):
            self.fail(f"{value!r} are no steps; write them like 2,10 (counted from 1).", param, ctx)
        return tuple(int(part) for part in parts)


@click.command(name="run", context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("-m", "is_module", is_flag=True, help="Run SCRIPT as a module, as python -m does.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Write snapshots, JSON and page to DIR; default: <trainer's output_dir>/_memprof, or ./_memprof without a "
    "trainer. If an earlier run wrote there, to DIR-2, DIR-3, ...",
)  # fmt: skip
@click.option(
    "--steps", type=_Steps(), metavar="N,...", help="Record these optimizer steps; default: one generation cycle."
)
@click.option("--every", type=click.IntRange(min=1), metavar="N", help="Record at every Nth step instead.")
@click.option(
    "--capacity", metavar="NAME|SIZE",
    help="Emulate a GPU such as 4090 or 24GB: a run that needs more memory runs out of it.",
)  # fmt: skip
@click.option(
    "--rehearse", is_flag=True, help="With a trainer: run one worst-case step first, then put everything back."
)
@click.option("--max-entries", type=click.IntRange(min=1), metavar="N", help="Record the N newest trace entries.")
@click.option(
    "--stacks", type=click.Choice(["python", "all", "none"]), default="python", show_default=True,
    help="Record the frames of Python, of C++ too (all), or none.",
)  # fmt: skip
@click.option(
    "--kind", type=click.Choice(["auto", "cuda", "trace"]), default="auto", show_default=True,
    help="Choose the recorder.",
)  # fmt: skip
@click.option(
    "--max-disk", metavar="SIZE", default="10GB", show_default=True,
    help="Limit the size of a run's files; the oldest recordings are deleted first.",
)  # fmt: skip
@redact_option
@click.option("--no-report", is_flag=True, help="Write snapshots only.")
@click.option("--no-table", is_flag=True, help="Print no table at the end.")
@click.option("--no-scalars", is_flag=True, help="Don't log memory/... metrics and don't record counters.")
@click.option("--no-reset-peaks", is_flag=True, help="Leave CUDA's peak counters to the script.")
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def command(script: str, arguments: tuple[str, ...], is_module: bool, **given: Any) -> Callable[[], None]:
    """Run SCRIPT with ARGS under memprof, without editing it.

    Every transformers.Trainer (TRL's are) gets a MemProfCallback. Without one, memprof records the first two steps of
    the loop, with its forwards, backwards and optimizer steps as phases. Exit code, signals, standard input and
    tracebacks are the script's own; the table goes to standard error. MEMPROF=0 runs it alone.

    SCRIPT may be a command of this environment that starts others, such as trl, swift or torchrun: trainers in the
    Python processes it starts are recorded. For other loops, put memprof behind the launcher: torchrun
    --nproc_per_node 2 -m memprof run train.py.
    """
    options = _options(given)
    from memprof.instrument.child_processes import Children
    from memprof.instrument.run import ImportWatcher
    from memprof.instrument.script import Script
    from memprof.recording.api import switched_off

    target = Script.named(script, arguments, is_module)
    target.check()
    if given["out"] is not None:
        check_folder(given["out"])
    if switched_off():
        return lambda: target.run(lambda: None, lambda _: None)
    attachment = ImportWatcher(options, Children())

    def end(error: BaseException | None) -> None:
        attachment.end(error)
        attachment.say_if_untouched()

    return lambda: target.run(attachment.begin, end)


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Translate the command's options into the callback's; a size that cannot be read is refused now, not when the
    model is loaded."""
    from memprof.config.gpus import capacity_bytes

    if given["steps"] and given["every"]:
        raise UsageError("--steps and --every exclude each other; give one.")
    capacity, disk = given["capacity"], given["max_disk"]
    return {
        **{name: given[name] for name in ("steps", "every", "max_entries", "kind", "redact", "rehearse")},
        **{name: not given[f"no_{name}"] for name in ("report", "table", "scalars", "reset_peaks")},
        "output_dir": given["out"],
        "stacks": None if given["stacks"] == "none" else given["stacks"],
        "capacity": None if capacity is None else capacity_bytes(capacity),
        "max_disk": None if disk is None else parse_size(disk),
    }
