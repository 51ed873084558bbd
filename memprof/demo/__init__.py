"""A small real GRPO run, profiled: what ``memprof demo`` and ``make demo`` start.

Importing this package is cheap: torch, transformers and TRL are loaded by :func:`run`.
"""

from __future__ import annotations

from memprof.demo.run import DemoResult, RunResult, run

__all__ = ["DemoResult", "RunResult", "run"]
