"""Simulate what a command line asks for: settings or a script's trainer, judged on a GPU, studied over lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memprof.cli.emit import Output, emit
from memprof.errors import UsageError, how_to_install
from memprof.reports.renderers import Answer

if TYPE_CHECKING:
    from memprof.config.settings import Settings, Value
    from memprof.executors import ExecutorChoice
    from memprof.foreign import SnapshotFile
    from memprof.plan.simulations import SimulatedRow
    from memprof.simulate.evaluate import Outcome
    from memprof.simulate.lengths import CompletionLengths


def need_torch() -> None:
    """Refuse to simulate where a package that it executes is not installed: a UsageError says how to install it."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers", "trl", "peft") if find_spec(name) is None]
    if missing:
        raise UsageError(f"simulating needs {', '.join(missing)}: {how_to_install('trl')}.")


def emit_simulated(answer: Answer, outcome: Outcome, output: Output) -> None:
    """Write the snapshot where ``-o`` names no page, then emit the answer with the verdict."""
    if output.page is not None and output.page.suffix != ".html":
        from memprof.snapshot.writer import save_snapshot

        save_snapshot(outcome.raw, output.page)
        click.echo(f"Snapshot: {output.page}", err=True)
        output = replace(output, page=None)
    verdict = outcome.verdict
    if verdict is None:
        emit(answer, output)
    else:
        emit(answer, output, verdict.sentence(), verdict.fits)


class SettingsRun:
    """Hold settings to simulate, and the GPU to judge them on."""

    def __init__(self, settings: Settings, gpu: str | None) -> None:
        need_torch()
        from memprof.config.gpus import find_gpu

        self.settings, self.gpu = settings, gpu
        self.card = find_gpu(gpu) if gpu is not None else None
        self.label = settings.model

    def outcome(
        self, completion_lengths: str | None, workers: int | None, executor: ExecutorChoice | None = None
    ) -> Outcome:
        """Simulate and judge the run, and study it over lengths where they are given."""
        from memprof.simulate.lengths import read_lengths

        if completion_lengths is not None and self.settings.supervised:
            raise UsageError("--completion-lengths is for GRPO; --trainer sft and dpo have rows of --max-length.")
        longest = self.settings.completion_length
        lengths = read_lengths(completion_lengths, longest) if completion_lengths is not None else None
        outcome = self.judged()
        if lengths is not None:
            self._study(outcome, lengths, workers, executor)
        return outcome

    def _study(
        self, outcome: Outcome, lengths: CompletionLengths, workers: int | None, executor: ExecutorChoice | None
    ) -> None:
        """Simulate other lengths too, and put the results into the snapshot and all that is made from it."""
        from memprof.report.codec import to_builtins
        from memprof.simulate.evaluate import summary_of
        from memprof.simulate.lengths import study

        settings = self.settings
        known = {settings.completion_length: summary_of(outcome)}
        found = study(settings, lengths, lambda wanted: self.rows(wanted, workers, executor), known)
        outcome.raw["memprof"]["lengths"] = to_builtins(found)
        analysis = outcome.analysis
        analysis.snapshot = analysis.snapshot.with_run(lengths=found)

    def judged(self) -> Outcome:
        """Simulate once, and once more where only cached memory is too much."""
        from memprof.config.catalogue import find_config

        find_config(self.settings.model)  # a mistyped name is refused before the trainers are imported
        from memprof.advice.estimate import estimated_advice
        from memprof.simulate.evaluate import evaluate

        return evaluate(self.settings, self.card, advisor=estimated_advice)

    def rows(
        self, wanted: list[Settings], workers: int | None, executor: ExecutorChoice | None = None
    ) -> list[SimulatedRow]:
        """Simulate the run at other lengths, in parallel; results are remembered."""
        from memprof.plan.subprocess_runner import runner

        with runner(self.gpu, workers=workers, executor=executor) as machine:
            return machine.run(wanted)


class SimulatedScript(SettingsRun):
    """Hold a training script whose trainer is simulated instead of trained; ``changes`` replace its own settings."""

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str],
        changes: Mapping[str, Value],
        device: str,
        gpu: str | None,
        allow_unsimulated: bool = False,
    ) -> None:
        from memprof.config.settings import Settings

        super().__init__(Settings(model=script.name, device=device), gpu)
        self.script, self.arguments, self.changes, self.device = script, tuple(arguments), changes, device
        self.allow_unsimulated = allow_unsimulated

    def outcome(
        self, completion_lengths: str | None, workers: int | None, executor: ExecutorChoice | None = None
    ) -> Outcome:
        """Simulate and judge the run; how long completions may be is known only when the script has run."""
        from memprof.simulate.lengths import read_lengths

        outcome = self.judged()
        if completion_lengths is not None:
            self.settings = self._own_settings(outcome)
            self._study(outcome, read_lengths(completion_lengths, self.settings.completion_length), workers, executor)
        return outcome

    def _own_settings(self, outcome: Outcome) -> Settings:
        config = outcome.analysis.snapshot.run.config or {}
        if "num_generations" not in config:
            raise UsageError("--completion-lengths is for GRPO; this script trains with another trainer.")
        names = ("completion_length", "per_device_train_batch_size", "gradient_accumulation_steps")
        return self.settings.with_(
            **{name: config[name] for name in (*names, "steps_per_generation", "num_generations")}
        )

    def judged(self) -> Outcome:
        """Simulate the script's trainer with the changes."""
        return self._simulated(self.changes)

    def rows(
        self, wanted: list[Settings], workers: int | None, executor: ExecutorChoice | None = None
    ) -> list[SimulatedRow]:
        """Simulate the script at other lengths, one after the other: a script runs in this process."""
        from memprof.simulate.evaluate import summary_of

        lengths = [settings.completion_length for settings in wanted]
        return [summary_of(self._simulated({**self.changes, "completion_length": length})) for length in lengths]

    def _simulated(self, changes: Mapping[str, Value]) -> Outcome:
        from memprof.advice.estimate import estimated_advice
        from memprof.simulate.evaluate import judge
        from memprof.simulate.script.script import simulate_script

        def once(capacity: int | None) -> SnapshotFile:
            return simulate_script(
                self.script, self.arguments, changes, device=self.device, capacity=capacity, gpu=self.card,
                allow_unsimulated=self.allow_unsimulated,
            )  # fmt: skip

        return judge(once, self.card, estimated_advice)
