"""``memprof plan``: what fits a GPU, found by simulating it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from memprof.cli.options import emit, format_option, json_option, save_json
from memprof.cli.simulation_options import run_options, settings_of
from memprof.errors import UsageError

__all__ = ["command", "progress", "value_of"]


@click.command(name="plan", short_help="What fits a GPU, and what to set.")
@run_options
@click.option("--gpu", required=True, metavar="NAME|SIZE", help="A name such as H100, or a size such as 24GB.")
@click.option(
    "--maximize", type=click.Choice(["context", "num_generations", "batch"]), default="context", show_default=True,
    help="What is made as large as fits.",
)  # fmt: skip
@click.option("--vary", metavar="NAME=V,V,...", help="Compare values of one setting, such as num_generations=2,4,8,16.")
@click.option("--no-search", is_flag=True, help="Only the table.")
@click.option("--yaml", "as_yaml_", is_flag=True, help="Print the best configuration as YAML.")
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Processes; default: one a core.")
@click.option("--no-cache", is_flag=True, help="Simulate again what is already known.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Page (.html) with the rows drawn."
)
@format_option
@json_option
def command(
    config_file: Path | None,
    gpu: str,
    maximize: str,
    vary: str | None,
    no_search: bool,
    as_yaml_: bool,
    workers: int | None,
    no_cache: bool,
    output: Path | None,
    style: str,
    json_file: Path | None,
    **given: Any,
) -> None:
    """Simulate training methods for a model on a GPU: a table of what fits, and the best configuration found, ready to
    paste. Results are kept, so that asking again is quick.

    Exit code 4: nothing fits.
    """
    from memprof.config.gpus import find_gpu

    find_gpu(gpu)
    if output is not None and output.suffix != ".html":
        raise UsageError(f"-o {output}: a plan is written as a page; give a name that ends in .html, or use --json.")
    varied = _vary(vary)
    base = settings_of(config_file, {**given, **_most_gpus(varied)})
    fixed = {name for name, value in given.items() if value is not None}
    if config_file is not None:
        from memprof.config.settings import read_settings

        fixed |= set(read_settings(config_file))
    from memprof.cli.commands.simulate import need_torch
    from memprof.plan import make_plan

    need_torch()
    with progress() as told:
        plan = make_plan(
            base, gpu, fixed=fixed, maximize=maximize, vary=varied, search=not no_search,
            workers=workers, use_cache=not no_cache, progress=told,
        )  # fmt: skip
    _say(plan, style, json_file, as_yaml_, output)
    if not any(row.fits for row in plan.rows) and plan.best is None:
        sys.exit(4)


def _vary(text: str | None) -> tuple[str, list[Any]] | None:
    if text is None:
        return None
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    parts = [v.strip() for v in values.split(",") if v.strip()]
    if not parts:
        raise UsageError(f"--vary {text!r}: write it like num_generations=2,4,8.")
    return name, [value_of(part) for part in parts]


def _most_gpus(varied: tuple[str, list[Any]] | None) -> dict[str, Any]:
    """How many GPUs are planned for where that is what varies: ``--sharding`` needs several."""
    if varied is None or varied[0] != "gpus":
        return {}
    return {"gpus": max((n for n in varied[1] if isinstance(n, int)), default=1)}


def value_of(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@contextmanager
def progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Simulating", total=None)
        yield lambda done, asked: bar.update(task, completed=done, total=asked)


def _say(plan: Any, style: str, json_file: Path | None, as_yaml_: bool, output: Path | None) -> None:
    from memprof.plan import paste as words
    from memprof.reports.json import dumps

    data = {**plan.to_dict(), "code": words.as_python(plan.best) if plan.best is not None else None}
    if output is not None:
        from memprof.reports.html.plan import write_plan

        write_plan(data, output)
        click.echo(f"Page: {output}", err=True)
    if (json_file is not None and str(json_file) == "-") or style == "json":
        emit(dumps(data))
        return
    save_json(data, json_file)
    if style == "markdown":
        emit(words.markdown(plan))
    else:
        from memprof.reports.html.plan import bars

        emit(words.text(plan, bars(data, sys.stdout)))
    if as_yaml_ and plan.best is not None:
        emit("\n" + words.as_yaml(plan.best))
