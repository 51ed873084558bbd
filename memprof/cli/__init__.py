"""The command line: one file per command, loaded when called; ``memprof --help`` imports click only."""

from __future__ import annotations

from memprof.cli.group import main

__all__ = ["main"]
