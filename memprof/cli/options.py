"""Define the options that several commands share, and check them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memprof.errors import InputError, UsageError

if TYPE_CHECKING:
    from memprof.executors import ExecutorChoice


class _Recording(click.Path):
    """Accept the path of a recording, or a URL that fsspec opens (s3://, gs://, hf://, https://, ...)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a path; a URL becomes one of :mod:`memprof.snapshot.remote`, which is loaded for it only."""
        if isinstance(value, str) and "://" in value:
            from memprof.snapshot.remote import place_of

            return place_of(value)
        return super().convert(value, param, ctx)


RECORDING = _Recording(path_type=Path, allow_dash=True)

device_option = click.option(
    "--device", type=click.IntRange(min=0), metavar="N",
    help="Analyze this device. Default: the device that ran out of memory, else the highest-memory device.",
)  # fmt: skip
snapshot_option = click.option(
    "--snapshot", "number", type=click.IntRange(min=1), metavar="N",
    help="Read the Nth snapshot of a file that has several.",
)  # fmt: skip
rules_option = click.option(
    "--rules", type=click.Path(path_type=Path), metavar="FILE",
    help="Add these stack rules (TOML) to the shipped ones, which they override.",
)  # fmt: skip
redact_option = click.option(
    "--redact", is_flag=True, help="Leave out paths, names of hosts and users, addresses, command lines and secrets."
)
seconds_option = click.option(
    "--seconds", type=click.FloatRange(min=0), default=180.0, show_default=True, metavar="S",
    help="Start no simulation after this long; estimate the rest.",
)  # fmt: skip


def _without_cache(context: click.Context, _option: click.Parameter, chosen: bool) -> None:
    """Disable the cache of simulations for this command and the processes that it starts."""
    if not chosen:
        return
    before = os.environ.get("MEMPROF_CACHE")
    os.environ["MEMPROF_CACHE"] = "0"

    @context.call_on_close
    def restore() -> None:
        os.environ.pop("MEMPROF_CACHE") if before is None else os.environ.update(MEMPROF_CACHE=before)


no_cache_option = click.option(
    "--no-cache", is_flag=True, expose_value=False, callback=_without_cache,
    help="With --advise: simulate again what is already known.",
)  # fmt: skip


def executor_option(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--executor`` and its timeout, which the command receives as one ``executor``: None for this machine."""

    @click.option(
        "--executor",
        default="local",
        show_default=True,
        metavar="local|dask:ADDRESS|ray[:ADDRESS]",
        help="Work in processes of this machine, on a Dask or on a Ray cluster.",
    )
    @click.option(
        "--executor-timeout", type=click.FloatRange(min=1), metavar="SECONDS",
        help="Stop when a cluster sends nothing for so long, neither a connection nor a result. Default: 60.",
    )  # fmt: skip
    @wraps(command)
    def with_choice(*args: Any, executor: str, executor_timeout: float | None, **kwargs: Any) -> None:
        command(*args, executor=_choice(executor, executor_timeout), **kwargs)

    return with_choice


def _choice(name: str, timeout_s: float | None) -> ExecutorChoice | None:
    if name == "local":
        if timeout_s is not None:
            raise UsageError("--executor-timeout is for a cluster: give --executor dask:ADDRESS or ray[:ADDRESS].")
        return None
    from memprof.executors import ExecutorChoice

    return ExecutorChoice.named(name) if timeout_s is None else ExecutorChoice.named(name, timeout_s)


def check_folder(folder: Path) -> None:
    """Check (InputError), before a long run, that a folder can be made and written to, without making it."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise InputError(f"{folder}: cannot be written to ({nearest.name} is no folder).")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"{folder}: cannot be written to ({nearest} is read-only for this user).")
