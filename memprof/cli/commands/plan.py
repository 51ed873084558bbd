"""``memprof plan``: what fits a GPU, found by simulating it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from memprof.cli.emit import Output, emit, output_options
from memprof.cli.option_groups import grouped
from memprof.cli.options import executor_option
from memprof.cli.progress import progress
from memprof.cli.simulating import need_torch
from memprof.cli.simulation_options import (
    GROUPS,
    INSTEAD,
    OTHER_NAMES,
    given_settings,
    run_options,
    settings_of,
    value_of,
    with_gpu_count,
)
from memprof.errors import UsageError
from memprof.reports.renderers import Answer

if TYPE_CHECKING:
    from memprof.config.settings import Settings, Value
    from memprof.executors import ExecutorChoice
    from memprof.plan.planner import MethodPlan, SearchRow

SEARCH = "maximize vary no_search workers executor executor_timeout no_cache serve_beside max_model_len max_num_seqs"
_SHOWN = {"Required": "model gpu", **GROUPS, "Search": SEARCH}


@click.command(name="plan", cls=grouped(_SHOWN, aliases=OTHER_NAMES, advice=INSTEAD))
@run_options
@click.option(
    "--gpu", required=True, metavar="NAME|SIZE", help="Plan for this GPU: a name such as H100, or a size such as 24GB."
)
@click.option(
    "--maximize", type=click.Choice(["context", "num_generations", "batch", "speed"]),
    help="Search how large this can be; speed: with the micro-batch that fits. Default: recommend a run as given.",
)  # fmt: skip
@click.option("--vary", metavar="NAME=V,V,...", help="Compare values of one setting, such as num_generations=2,4,8,16.")
@click.option("--no-search", is_flag=True, help="Search nothing, as without --maximize.")
@click.option("--yaml", "with_yaml", is_flag=True, help="Print the best configuration as YAML too.")
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Simulate in N processes; default: one a core."
)
@executor_option
@click.option(
    "--serve-beside", metavar="SIZE",
    help="Plan vLLM on this GPU next to a trainer that uses SIZE: its share, context and sequences.",
)  # fmt: skip
@click.option(
    "--max-model-len", type=click.IntRange(min=1), metavar="TOKENS", help="With --serve-beside: the longest sequence."
)
@click.option("--max-num-seqs", type=click.IntRange(min=1), metavar="N", help="With --serve-beside: most sequences.")
@click.option("--no-cache", is_flag=True, help="Simulate again what is already known.")
@click.argument("model_name", required=False, metavar="[MODEL]")
@output_options("plan", page="Write the HTML page, with the rows drawn, to FILE.html.")
def command(
    config_file: Path | None,
    gpu: str,
    maximize: str | None,
    vary: str | None,
    no_search: bool,
    with_yaml: bool,
    workers: int | None,
    executor: ExecutorChoice | None,
    serve_beside: str | None,
    max_model_len: int | None,
    max_num_seqs: int | None,
    no_cache: bool,
    model_name: str | None,
    output: Output,
    **given: Any,
) -> None:
    """Find what fits a GPU: simulate training methods for a model as given, list what fits, and print the recommended
    configuration, ready to paste: of those that fit in stock TRL the fastest that trains the most. memprof keeps
    results: asking again is quick.

    With --serve-beside: say what gpu_memory_utilization, max_model_len and max_num_seqs to give a vLLM that shares the
    GPU with the trainer. This simulates nothing.

    Exit code 4: nothing fits.
    """
    if model_name is not None:
        if given.get("model") is not None:
            raise UsageError(f"{model_name!r} and --model {given['model']} both name a model: give one of them.")
        given = {**given, "model": model_name}
    single, given = with_gpu_count(gpu, config_file, given)
    gpu = single or gpu
    if output.page is not None and output.page.suffix != ".html":
        raise UsageError(
            f"-o {output.page}: a plan is written as a page; give a name that ends in .html, or use --json."
        )
    if serve_beside is None and (max_model_len, max_num_seqs) != (None, None):
        raise UsageError("--max-model-len and --max-num-seqs require --serve-beside SIZE.")
    if maximize in ("num_generations", "batch") and (no_search or vary is not None):
        other = "--vary" if vary is not None else "--no-search"
        raise UsageError(f"--maximize {maximize} changes nothing without a search: drop it, or {other}.")
    if serve_beside is not None:
        search = {
            "maximize": maximize is not None, "vary": vary, "no_search": no_search, "yaml": with_yaml,
            "workers": workers, "no_cache": no_cache,
        }  # fmt: skip
        _refuse_idle({**given, **search})
        _serve(settings_of(config_file, given), gpu, serve_beside, max_model_len, max_num_seqs, output)
        return
    varied = _vary(vary)
    # An adapter's settings concern the methods with an adapter only.
    base = settings_of(
        config_file, {**given, **_most_gpus(varied)}, open_names=("lora_r", *(varied[:1] if varied is not None else ()))
    )
    if base.supervised:
        raise UsageError(f"memprof plan is for GRPO; for --trainer {base.trainer} ask memprof simulate.")
    fixed = set(given_settings(config_file, given))
    from memprof.plan import make_plan

    need_torch()
    with progress() as told:
        plan = make_plan(
            base, gpu, fixed=fixed, maximize=maximize, vary=varied, search=not no_search,
            workers=workers, use_cache=not no_cache, progress=told, executor=executor,
            on_row=_row_line if told is None else None,
        )  # fmt: skip
    emit(_answer(plan, with_yaml), output, fits=any(row.fits for row in plan.rows) or plan.best is not None)


def _refuse_idle(given: Mapping[str, object]) -> None:
    """Refuse what changes nothing in a plan of an engine, which takes the model, the lengths and the batch."""
    idle = [f"--{name.replace('_', '-')}" for name, value in given.items() if value and name not in _OF_AN_ENGINE]
    if idle:
        raise UsageError(
            f"--serve-beside plans only an engine, which these options don't affect: drop {', '.join(idle)}."
        )


_OF_AN_ENGINE = (
    "model", "prompt_length", "completion_length", "max_length", "trainer", "num_generations",
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
)  # fmt: skip


def _serve(
    settings: Settings, gpu: str, beside: str, max_model_len: int | None, max_num_seqs: int | None, output: Output
) -> None:
    """Plan the engine that shares the card with a trainer; by default it serves the run's own lengths and batch."""
    from memprof.config.catalogue import find_config
    from memprof.config.gpus import find_gpu
    from memprof.config.model_shape import ModelShape
    from memprof.plan.serving import plan_serving
    from memprof.units import parse_size

    if output.page is not None:
        raise UsageError("-o: a plan of an engine has no page; leave it out, or use --json or --format markdown.")
    if beside.strip().isdecimal():
        raise UsageError(f"--serve-beside {beside}: give a unit, such as {beside}GiB.")
    plan = plan_serving(
        settings.model,
        ModelShape.of(find_config(settings.model)),
        gpu,
        find_gpu(gpu).total_bytes,
        parse_size(beside),
        max_model_len or settings.sequence_length,
        max_num_seqs or settings.per_device_train_batch_size * settings.generation_steps,
    )
    emit(Answer("serving", plan, lambda: plan), output, fits=plan.fits)


def _row_line(row: SearchRow) -> None:
    """Print a row on standard error when it is simulated."""
    from memprof.units import gib

    verdict = "fits" if row.fits else "does not fit"
    click.echo(f"{row.method}: {verdict}, needs {gib(row.device_peak_bytes)} GiB", err=True)


def _vary(text: str | None) -> tuple[str, list[Value]] | None:
    if text is None:
        return None
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    parts = [v.strip() for v in values.split(",") if v.strip()]
    if not parts:
        raise UsageError(f"--vary {text!r}: write it like num_generations=2,4,8.")
    return name, [value_of(part) for part in parts]


def _most_gpus(varied: tuple[str, list[Value]] | None) -> dict[str, int]:
    """Plan for the most GPUs where their number varies: ``--sharding`` needs several."""
    if varied is None or varied[0] != "gpus":
        return {}
    return {"gpus": max((n for n in varied[1] if isinstance(n, int)), default=1)}


def _answer(plan: MethodPlan, with_yaml: bool) -> Answer:
    from memprof.config.to_trl_config import as_python, as_yaml
    from memprof.reports.document.plan import PlanDocument

    best, fastest = plan.best, plan.fastest
    found = replace(
        plan.answer(),
        code=as_python(best.settings) if best is not None else None,
        fastest_code=as_python(fastest.settings) if fastest is not None else None,
    )
    yaml = as_yaml(best.settings) if with_yaml and best is not None else ""
    return Answer("plan", found, lambda: PlanDocument(found, yaml))
