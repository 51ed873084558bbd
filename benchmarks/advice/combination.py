"""Make a full fine-tune of Qwen2.5-7B fit 24 GB with the changes that advice combines.

    python -m benchmarks.advice combination --out benchmarks/results/cpu/advice.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.advice.results import OUT, known, save


def combination(machine: Any) -> dict[str, Any]:
    """Combine advice for a full fine-tune of Qwen2.5-7B on 24 GB; simulate the set once more on its own.

    ``machine`` simulates on that GPU (:class:`memprof.plan.subprocess_runner.Runner`).
    """
    from memprof.advice.combine import combine
    from memprof.advice.recorded_run import Run
    from memprof.config.catalogue import find_config
    from memprof.config.model_shape import ModelShape
    from memprof.config.settings import Settings
    from memprof.plan.simulations import Question
    from memprof.report.codec import to_builtins
    from memprof.simulate.evaluate import run_row

    settings = Settings(model="Qwen/Qwen2.5-7B-Instruct", prompt_length=512, completion_length=512)
    like = Run(peaks=(), settings=settings, shape=ModelShape.of(find_config(settings.model)))
    found = combine(settings, "24GB", machine, like, seconds=1e9)
    before = machine.run([settings])[0]
    again = run_row(Question(settings=found.settings, gpu="24GB"))
    return {
        **to_builtins(found), "allocated_before_bytes": before.peak_bytes, "simulations": machine.executed,
        "confirmed": {"fits": again.fits, "needed_bytes": again.device_peak_bytes},
    }  # fmt: skip


@click.command(help=__doc__)
@click.option("--workers", default=1, show_default=True)
@OUT
def main(workers: int, out: Path | None) -> None:
    from memprof.plan.subprocess_runner import runner

    with runner("24GB", workers=workers) as machine:
        save({**known(out), "combination": combination(machine)}, out)
