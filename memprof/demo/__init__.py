"""Profile a small real GRPO run: ``memprof demo`` and ``make demo`` start it.

Importing this package is cheap, because only :func:`run` loads torch, transformers and TRL.
"""

from __future__ import annotations

from memprof.demo.run import DemoResult, RunResult, run

__all__ = ["DemoResult", "RunResult", "run"]
