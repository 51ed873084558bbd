"""Run the ``memprof`` command: list its subcommands, load the one that is called, end with its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn, TextIO

import click

from memprof._version import __version__
from memprof.errors import InputError, MemprofError

#: What a command finds as its context's ``obj`` where the process was started for it alone.
OWN_PROCESS = "own process"
# name -> one line of help. The line is here so that listing the commands loads none of them.
_COMMANDS = {
    "report": "Show where a snapshot's memory went: table, JSON or HTML page.",
    "compare": "Put runs side by side and show what differs.",
    "explain": "List each allocation alive at one instant, and how it is known.",
    "advise": "Find what would lower a run's peak, by simulating each change.",
    "simulate": "Predict a run's memory without a GPU.",
    "plan": "Find what fits a GPU, and the best settings for it.",
    "watch": "Show the newest counters of a running or finished job.",
    "run": "Run a training script with memprof attached, unedited.",
    "emulate": "Run a CUDA training script without a GPU, real allocator (experimental).",
    "oom": "Explain an out-of-memory message, number by number.",
    "mcp": "Answer assistants over the Model Context Protocol.",
    "demo": "Train a small model with GRPO here, profiled and reported.",
}
# Commands that read and never train, launch or watch a run.
_READING = ("report", "compare", "explain")


class _LazyGroup(click.Group):
    """Imports a command when it is called; turns errors into one sentence and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        if ctx.obj == OWN_PROCESS and cmd_name in _READING:
            # numpy's OpenBLAS starts a thread a core when it is imported, which costs more than a small file's
            # reading; reading multiplies no matrices. A run that is watched keeps its own environment.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        command: click.Command = import_module(f"memprof.cli.commands.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; suggest one where the name is misspelt."""
        if args and args[0] not in _COMMANDS:
            from difflib import get_close_matches

            if near := get_close_matches(args[0], _COMMANDS, 1):
                ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        code: Any = 0
        closed = _stand_in_for_closed_streams()
        try:
            # Without standalone mode click returns the code of --help and --version instead of exiting with it.
            extra.setdefault("obj", OWN_PROCESS if args is None else None)
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
            if not callable(code):
                sys.exit(code if isinstance(code, int) else 0)
        except click.exceptions.Abort:
            sys.exit(130)
        except click.ClickException as error:
            _fail(_suggesting_output(error).show, error.exit_code)
        except MemprofError as error:
            _fail(f"memprof: {error}", error.exit_code)
        except BrokenPipeError:
            # No error is printed when the reader of the pipe is gone, now or while Python flushes at the end.
            _silence(sys.stdout)
            sys.exit(141)
        except OSError as error:
            # What is left to be written, now or while Python flushes at the end, would fail as well.
            _fail(f"memprof: {InputError(f'cannot go on: {error.strerror or error}')}.", InputError.exit_code)
        except KeyboardInterrupt:
            sys.exit(130)
        except MemoryError:
            _fail("memprof: not enough memory on this machine to do that.", 3)
        for name in closed:
            setattr(sys, name, None)
        code()  # a script under memprof run: it ends in its own way


def _suggesting_output(error: click.ClickException) -> click.ClickException:
    """Return the error; who types ``--html`` for the page is told of ``-o``."""
    if not isinstance(error, click.NoSuchOption) or error.option_name != "--html" or error.ctx is None:
        return error
    if not any("-o" in option.opts for option in error.ctx.command.params):
        return error
    return click.UsageError("No such option: --html. The page is written with -o FILE.html.", ctx=error.ctx)


def _fail(sentence: str | Callable[[], None], code: int) -> NoReturn:
    say = sentence if callable(sentence) else lambda: click.echo(sentence, err=True)
    for step, stream in ((sys.stdout.flush, sys.stdout), (say, sys.stderr)):
        try:
            step()
        except OSError:  # a full disk
            _silence(stream)
    sys.exit(code)


def _silence(stream: TextIO) -> None:
    """Let what still is to be written to a stream of this process go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _stand_in_for_closed_streams() -> list[str]:
    """Open nothing in the place of standard streams that the caller has closed (``>&-``); return their names."""
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    return closed


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="memprof")
def main() -> None:
    """Show where every byte of a GRPO run's GPU memory went, and how that is known.

    \b
    memprof report snapshot.pickle -o page.html     where the memory went
    memprof oom train.log                           why it ran out, and what to do
    memprof run train.py                            record a run, unedited
    memprof simulate --model Qwen/Qwen2.5-0.5B-Instruct --gpu 24GB
    memprof plan --model Qwen/Qwen2.5-7B-Instruct --gpu "RTX 4090"

    Exit codes: 0 done, 1 above the limit of compare --fail-above, 2 wrong usage, 3 a file cannot be used, 4 a run does
    not fit.
    """
