"""Run TRL's own tests of GRPO, RLOO and callbacks three ways, and compare.

    python -m benchmarks.trl_suite FOLDER [--suite grpo] [--way lean] [-k EXPRESSION] [--json FILE]

FOLDER is a checkout of TRL, or its source at the tag of the installed version: TRL's source distribution and wheel have
no tests. Nothing is downloaded; models and datasets of the Hub are replaced by local stand-ins. The ways are TRL's own
trainers, the same with memprof's callback, and the lean trainers in their place. A test that fails with TRL's own
trainer, for want of a real vocabulary or because it is of another version, counts for none.

Takes about half an hour on two cores. Exit code 1: a test that passes with TRL's trainer does not pass another way.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.measure import write_result
from benchmarks.tabling import ROOT
from benchmarks.trl_suite.compare import Comparison, compared, printed, read_outcomes
from benchmarks.trl_suite.plugin import CALLBACK, LEAN, TRL, VARIABLE, WAYS

#: Files of tests, and the ways that say something about them: the callbacks' tests train with transformers' Trainer.
SUITES = {
    "grpo": ("test_grpo_trainer.py", WAYS),
    "rloo": ("test_rloo_trainer.py", WAYS),
    "callbacks": ("test_callbacks.py", (TRL, CALLBACK)),
}


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--suite", "suites", type=click.Choice(list(SUITES)), multiple=True, default=tuple(SUITES))
@click.option("--way", "ways", type=click.Choice([CALLBACK, LEAN]), multiple=True, default=(CALLBACK, LEAN))
@click.option("-k", "expression", default="", help="Run the tests whose names match, as with pytest -k.")
@click.option("--work", type=click.Path(path_type=Path), help="Folder for stand-ins and results. Default: a new one.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    folder: Path, suites: Sequence[str], ways: Sequence[str], expression: str, work: Path | None, json_path: Path | None
) -> None:
    import trl

    from benchmarks.trl_suite.stand_ins import make_models, models_named

    missing = [file for file, _ in SUITES.values() if not (folder / "tests" / file).is_file()]
    if missing:
        raise click.UsageError(f"{folder} has no tests/{missing[0]}: give the folder of a TRL checkout.")
    stated = folder / "VERSION"
    version = stated.read_text(encoding="utf-8").strip() if stated.is_file() else "unknown"
    if version != trl.__version__:
        print(f"The tests are of TRL {version}, and TRL {trl.__version__} is installed.", file=sys.stderr)
    work = work or Path(tempfile.mkdtemp(prefix="memprof-trl-suite-"))
    work.mkdir(parents=True, exist_ok=True)
    sources = [folder / "tests" / file for file, _ in SUITES.values()]
    failed = make_models(models_named(sources), work / "hub")
    for name, why in failed.items():
        print(f"No stand-in for {name}: {why}", file=sys.stderr)
    found = [_compare(folder, suite, ways, expression, work) for suite in suites]
    print(printed(found))
    write_result(
        {"tests_of": version, "no_stand_in": sorted(failed), "suites": [one.to_dict() for one in found]}, json_path
    )
    if any(one.worse for one in found):
        sys.exit(1)


def _compare(folder: Path, suite: str, ways: Sequence[str], expression: str, work: Path) -> Comparison:
    file, known = SUITES[suite]
    outcomes = {}
    for way in (way for way in known if way == TRL or way in ways):
        results = work / suite / way
        _run(folder, file, way, expression, results, work / "hub")
        outcomes[way] = read_outcomes(results)
    return compared(suite, outcomes, work / suite)


def _run(folder: Path, file: str, way: str, expression: str, results: Path, hub: Path) -> None:
    """Run one file of TRL's tests in a process of its own, whose package ``tests`` is TRL's."""
    for old in results.glob("*") if results.is_dir() else ():
        old.unlink()
    offline = {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **offline, VARIABLE: f"{way}:{results}", "PYTHONPATH": str(ROOT)}
    chosen = ["-k", expression] if expression else []
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "benchmarks.trl_suite.plugin",
               "-p", "no:cacheprovider", "-W", "ignore", f"tests/{file}", *chosen]  # fmt: skip
    results.mkdir(parents=True, exist_ok=True)
    with (results / "pytest.log").open("w", encoding="utf-8") as log:
        code = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=False).returncode
    if code not in (0, 1):
        raise click.ClickException(f"pytest ended with {code} ({way}, {file}): see {results / 'pytest.log'}")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.trl_suite")
