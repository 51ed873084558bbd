"""Run the demo from end to end: checkpoint and questions, two profiled runs, a page and a table for each."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.errors import InputError, MemprofError, UsageError, how_to_install

if TYPE_CHECKING:
    from memprof.analysis.allocations.differences import Holdings
    from memprof.demo.data import Questions
    from memprof.demo.model import Checkpoint
    from memprof.demo.training import Recipe, Scale, TrainedRun
    from memprof.report import Report
    from memprof.reports.document.model import Document

_QUESTIONS = 8
_QUICK_TOKENS = 24


@dataclass(frozen=True)
class RunResult:
    """Hold one profiled run and its files: snapshot, report JSON and page; ``held`` are the blocks at its peak."""

    name: str
    title: str
    snapshot: Path
    json: Path
    html: Path
    report: Report
    trained: TrainedRun
    document: Document = field(repr=False)
    held: Holdings = field(repr=False)


@dataclass(frozen=True)
class DemoResult:
    """Hold everything the demo wrote, and describe in words what it ran on."""

    out: Path
    model: str
    questions: str
    runs: tuple[RunResult, ...]
    comparison: Path


def run(out: Path, *, quick: bool = False) -> DemoResult:
    """Fine-tune a small model with GRPO, fully and then with LoRA, and report where the memory went.

    Writes ``full`` and ``lora`` as ``.html``, ``.json`` and ``.pickle`` into ``out``, each with the trainer's log
    (``.training.json``), prints the table of each, and ends with ``compare.html``. ``quick`` uses the tiny random model
    and short answers, and takes seconds instead of minutes.

    Raises:
        UsageError: torch, transformers, TRL, PEFT or datasets is not installed.
        InputError: ``out`` cannot be written.
        MemprofError: the run trained nothing (constant rewards or unmoved weights) or left no snapshot.
    """
    _require("torch", "transformers", "trl", "peft", "datasets")
    _make_folder(out)
    _say("This trains a small model with GRPO, fully and then with LoRA, and shows where the memory of each run went.")
    with _quiet_libraries():
        from memprof.demo.data import load_questions
        from memprof.demo.model import prepare_checkpoint
        from memprof.demo.training import FULL, LORA, Scale

        checkpoint = prepare_checkpoint(out / "_model", tiny=quick)
        questions = load_questions(_QUESTIONS)
        scale = Scale(completion_tokens=_QUICK_TOKENS) if quick else Scale()
        _say(f"Model: {checkpoint.note}.")
        _say(f"Questions: {questions.source}.")
        runs = tuple(_profiled(recipe, scale, checkpoint, questions, out) for recipe in (FULL, LORA))
    comparison = _compared(runs, out / "compare.html")
    _say("Pages: " + ", ".join(str(done.html) for done in runs))
    _say(f"Side by side: {comparison}")
    if any((out / "tensorboard").rglob("events.*")):
        _say(f"Scalars, and the pages in a tab: tensorboard --logdir {out / 'tensorboard'}")
    return DemoResult(out, checkpoint.note, questions.source, runs, comparison)


def _profiled(recipe: Recipe, scale: Scale, checkpoint: Checkpoint, questions: Questions, out: Path) -> RunResult:
    from memprof.demo.training import train
    from memprof.integrations.callback.callback import MemProfCallback

    _say(f"\nTraining {scale.steps} steps of {scale.completions} completions: {recipe.title}.")
    board = out / "tensorboard" / recipe.name
    shutil.rmtree(board, ignore_errors=True)
    records = board / "_memprof"
    callback = MemProfCallback(output_dir=records, table=False)
    callbacks = [*_board(board), callback, _progress(scale.steps)]
    trained = train(recipe, scale, checkpoint, questions.items, out / "_work", callbacks)
    if not trained.learned:
        raise MemprofError(
            f"The {recipe.name} run trained nothing (reward_std {trained.reward_stds}, {trained.moved} of"
            f" {trained.trainable} tensors moved), so its profile would prove nothing."
        )
    snapshot = _keep(records, out / f"{recipe.name}.pickle")
    _write_json(
        {
            "checkpoint": checkpoint.path.relative_to(out).as_posix(),
            "questions": questions.source,
            "scale": asdict(scale),
            **asdict(trained),
        },
        out / f"{recipe.name}.training.json",
    )
    _say(f"  rewards varied; {trained.moved} of {trained.trainable} trainable tensors moved.")
    return _reported(recipe, checkpoint.path.name, snapshot, trained)


def _progress(steps: int) -> Any:
    """Make a callback that prints the reward after each step, because a step of the real model takes long."""
    from transformers import TrainerCallback

    class DemoProgress(TrainerCallback):  # type: ignore[misc]  # transformers is Any to mypy
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs and "reward" in logs:
                _say(f"  step {state.global_step}/{steps}: reward {logs['reward']:.3f} ± {logs['reward_std']:.3f}")

    return DemoProgress()


def _keep(records: Path, target: Path) -> Path:
    """Link (or copy) the last recorded step's snapshot to ``target``; the original stays for TensorBoard's tab."""
    found = sorted(records.glob("step-*.pickle"))
    if not found:
        raise MemprofError(f"The run left no snapshot in {records}: recording failed, see the warning above.")
    target.unlink(missing_ok=True)
    try:
        os.link(found[-1], target)
    except OSError:  # a file system without links
        shutil.copyfile(found[-1], target)
    return target


def _board(folder: Path) -> list[Any]:
    """Return the trainer's own reporter to TensorBoard, where TensorBoard is installed."""
    from importlib.util import find_spec

    if find_spec("tensorboard") is None:
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    return [TensorBoardCallback(SummaryWriter(str(folder)))]


def _reported(recipe: Recipe, model: str, snapshot: Path, trained: TrainedRun) -> RunResult:
    from memprof.advice.analyze_with_advice import analyze
    from memprof.analysis.allocations.holdings import holdings_of_analysis
    from memprof.report.files import write_answer
    from memprof.reports.document.build import document_of
    from memprof.reports.html.report import write_html
    from memprof.reports.terminal.report import print_document
    from memprof.snapshot import load_snapshot

    analysis = analyze(load_snapshot(snapshot))
    report = analysis.report
    document = document_of(analysis, label=f"{model}: {recipe.title}")
    html, data = snapshot.with_suffix(".html"), snapshot.with_suffix(".json")
    write_html(document, html)
    write_answer(report, data)
    print_document(document)
    held = holdings_of_analysis(analysis)
    return RunResult(recipe.name, recipe.title, snapshot, data, html, report, trained, document, held)


def _compared(runs: tuple[RunResult, ...], page: Path) -> Path:
    """Write the page that puts the runs side by side, and print its first sentences."""
    from memprof.analysis.compare import ComparisonColumn, badge_of, compare
    from memprof.reports.document.comparison import build_comparison
    from memprof.reports.html.compare import write_comparison

    columns = [ComparisonColumn(done.title, badge_of(done.report), done.report, held=done.held) for done in runs]
    comparison = build_comparison(compare(columns), [done.document for done in runs])
    write_comparison(comparison, page)
    _say("")
    for sentence in (comparison.headline.verdict, comparison.headline.cause):
        _say(sentence)
    return page


def _write_json(data: Mapping[str, object], path: Path) -> None:
    from memprof.files import write_text

    write_text(path, json.dumps(data, indent=1) + "\n")


def _require(*packages: str) -> None:
    from importlib.util import find_spec

    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise UsageError(f"The demo needs {', '.join(missing)}: {how_to_install('trl')}.")


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "_work").mkdir(exist_ok=True)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise InputError(f"Cannot write the demo's files to {out} ({why}); choose another folder with --out.") from None


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keep progress bars and deprecation notices of the libraries out of the demo's output."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        from transformers.utils import logging as transformers_logging

        before = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity(logging.ERROR)
        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(before)
            if bars:
                transformers_logging.enable_progress_bar()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
