"""Log each sentence of the lean trainer once."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class OnceLog:
    """Log each sentence of a trainer once; ``said`` holds them."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def say(self, what: str) -> None:
        """Log a sentence, unless this trainer has logged it."""
        self._log(logging.INFO, what)

    def warn(self, what: str) -> None:
        """Log a sentence as a warning, unless this trainer has logged it."""
        self._log(logging.WARNING, what)

    def _log(self, level: int, what: str) -> None:
        if what not in self.said:
            self.said.add(what)
            logger.log(level, "lean trainer: %s", what)
