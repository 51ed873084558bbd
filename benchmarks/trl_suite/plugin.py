"""A pytest plugin: TRL's tests with TRL's trainers, with memprof's callback added, or with the lean trainers.

It is loaded into the process that runs TRL's tests, whose package ``tests`` is TRL's. ``MEMPROF_TRL_SUITE`` holds the
way (:data:`WAYS`) and the folder for results.
"""

from __future__ import annotations

import functools
import json
import os
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "MEMPROF_TRL_SUITE"
TRL, CALLBACK, LEAN = "trl", "callback", "lean"
#: Whose trainers the tests run.
WAYS = (TRL, CALLBACK, LEAN)


@dataclass
class Outcome:
    """What became of one test.

    Attributes:
        test: its name, with the parameters.
        outcome: ``passed``, ``failed``, ``skipped`` or ``xfailed``.
        said: the last line of an error, or why it was skipped.
        seconds: its wall time.
        trained: files of parameters and of the first step's gradient, one for each ``train()`` that returned.
    """

    test: str
    outcome: str
    said: str
    seconds: float
    trained: list[str]


class Suite:
    """Note outcomes and trained parameters of one run of pytest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trained: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)

    def keep(self, trainer: Any, gradient: dict[str, Any]) -> None:
        """Save the parameters that a ``train()`` has left, and the ``gradient`` of its first optimizer step."""
        import torch

        path = self._folder / f"{len(list(self._folder.glob('*.pt'))):04d}.pt"
        parameters = {name: p.detach().cpu().float() for name, p in trainer.model.named_parameters()}
        torch.save({"parameters": parameters, "gradient": gradient}, path)
        self._trained.append(path.name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        """Begin each test with the same random numbers."""
        import numpy
        import torch

        self._trained = []
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write down what a test's call came to, or its setup where there was no call."""
        if report.when != "call" and (report.when != "setup" or report.passed):
            return
        said = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            said = str(report.longrepr[2])
        elif report.longrepr is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = str(crash.message if crash else report.longrepr).strip().split("\n")[0]
        outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
        name = report.nodeid.split("::", 1)[-1]
        found = Outcome(name, outcome, said[:300], report.duration, self._trained)
        with (self._folder / "outcomes.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(found)) + "\n")


def pytest_configure(config: Any) -> None:
    """Put the way's trainers in the place of TRL's before a test imports them."""
    way, _, folder = os.environ[VARIABLE].partition(":")
    suite = Suite(Path(folder))
    config.pluginmanager.register(suite, "memprof-trl-suite")

    import datasets
    import transformers

    from benchmarks.trl_suite.stand_ins import load_dataset

    datasets.load_dataset = load_dataset
    _keep_trained(transformers.Trainer, suite)
    if way == LEAN:
        _put_lean()
    elif way == CALLBACK:
        _add_callback(transformers.Trainer)


def _keep_trained(kind: Any, suite: Suite) -> None:
    from transformers import TrainerCallback

    train = kind.train

    class FirstGradient(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Copy the gradient of the first optimizer step, which no rounding of earlier steps has reached."""

        def __init__(self) -> None:
            self.found: dict[str, Any] = {}

        def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
            if not self.found:
                grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
                self.found = {name: grad.detach().cpu().float().clone() for name, grad in grads.items()}

    @functools.wraps(train)
    def kept(self: Any, *given: Any, **named: Any) -> Any:
        first = FirstGradient()
        self.add_callback(first)
        found = train(self, *given, **named)
        suite.keep(self, first.found)
        return found

    kind.train = kept


def _put_lean() -> None:
    import trl

    from memprof.grpo import LeanGRPOTrainer, LeanRLOOTrainer
    from memprof.grpo.config import LeanSettings

    LeanSettings.max_tokens_per_piece = 1  # by default all rows of so small a model are one piece
    trl.GRPOTrainer, trl.RLOOTrainer = LeanGRPOTrainer, LeanRLOOTrainer


def _add_callback(kind: Any) -> None:
    from memprof import MemProfCallback

    init = kind.__init__

    @functools.wraps(init)
    def watched(self: Any, *given: Any, **named: Any) -> None:
        named["callbacks"] = [*(named.get("callbacks") or []), MemProfCallback()]
        init(self, *given, **named)

    kind.__init__ = watched
