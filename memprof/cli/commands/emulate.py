"""``memprof emulate``: a CUDA training script on a card that is not there."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from memprof.cli.options import check_folder
from memprof.errors import UsageError

_FOLDER = "_memprof_emulated"
# Launchers by the modules behind them: a script of that name may be another environment's, with another torch.
_LAUNCHERS = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}


@click.command(name="emulate", context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("--setup", is_flag=True, help="Build the emulator for this environment's CUDA torch; then stop.")
@click.option(
    "--gpu", metavar="GPU", default="H100", show_default=True,
    help="Emulate this GPU: a model (4090) or a memory size (24GB).",
)  # fmt: skip
@click.option(
    "--devices", type=click.IntRange(1, 16), default=1, show_default=True, metavar="N",
    help="Pretend to have this many, at most 16.",
)  # fmt: skip
@click.option(
    "--steps", type=click.IntRange(min=0), default=2, show_default=True, metavar="N",
    help="End after N optimizer steps, and write no checkpoints; 0 runs the script to its end.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", default=_FOLDER, show_default=True,
    help="Write snapshots, JSON and page to DIR.",
)  # fmt: skip
@click.option("--no-values", is_flag=True, help="Compute no values: faster; losses mean nothing, no answer ends early.")
@click.option(
    "--values-max", type=click.IntRange(min=0), metavar="N",
    help="Leave operators with tensors above N elements uncomputed; default: 16777216.",
)  # fmt: skip
@click.option("--copy-max", metavar="SIZE", help="Leave larger copies out: for models that are larger than RAM.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def command(arguments: tuple[str, ...], setup: bool, **given: Any) -> Callable[[], None] | None:
    """Run COMMAND (such as `python train.py`) on an emulated NVIDIA GPU, and report its memory. Experimental.

    torch's own CUDA allocator runs on host memory that is counted against the GPU's memory: peaks, reserved memory and
    out-of-memory errors are the real ones. Kernels do not run: small tensors' values are computed on the CPU, and
    no time is a GPU's. torchrun works too; the exit code is COMMAND's.

    Needs a CUDA build of torch (a checkout's `make cuda` installs one), a C and a C++ compiler. --setup says what is
    missing. `memprof simulate` is faster and needs neither.
    """
    if setup:
        from memprof.emulate.build import build

        build(lambda line: click.echo(line, err=True))
        return None
    if not arguments:
        raise UsageError("memprof emulate requires a command: memprof emulate --gpu 24GB -- python train.py.")
    if arguments[0] in _LAUNCHERS:
        arguments = (sys.executable, "-m", _LAUNCHERS[arguments[0]], *arguments[1:])
    _say_whose(arguments, given["gpu"])
    check_folder(given["out"])
    env = _environment(given)
    if (program := shutil.which(arguments[0], path=env["PATH"])) is None:
        raise UsageError(f"{arguments[0]}: there is no such command.")
    return lambda: os.execve(program, arguments, env)


def _say_whose(arguments: tuple[str, ...], gpu: str) -> None:
    """Note that a card named behind the command belongs to the command, where none is named before it."""
    source = click.get_current_context().get_parameter_source("gpu")
    if "--gpu" in arguments and source is click.core.ParameterSource.DEFAULT:
        click.echo(
            f"--gpu after the command belongs to the command; the emulated GPU is {gpu}. Put --gpu first to choose it: "
            "memprof emulate --gpu 24GB -- python train.py.",
            err=True,
        )


def _environment(given: dict[str, Any]) -> dict[str, str]:
    """Return the environment for the command: a pretended card, a recorder, this environment's programs first."""
    from memprof.emulate.launch import environment
    from memprof.emulate.process_hooks import STEPS
    from memprof.instrument.emulated import asked

    env = environment(
        given["gpu"],
        devices=given["devices"],
        values=not given["no_values"],
        values_max=given["values_max"],
        copy_max=given["copy_max"],
    )
    # One step is recorded as such: the callback would wait for the second, where the optimizer's state is there.
    options = {"output_dir": str(given["out"].absolute()), "steps": (1,) if given["steps"] == 1 else None}
    env |= {STEPS: str(given["steps"])} | asked(options)
    env["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", os.defpath)])
    return env
