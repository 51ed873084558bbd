"""Log each sentence of the lean trainer once."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class OnceLog:
    """The sentences that one trainer has logged; ``said`` holds them."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def say(self, what: str) -> None:
        """Log a sentence, the first time it is said."""
        self._log(logging.INFO, what)

    def warn(self, what: str) -> None:
        """Log a sentence as a warning, the first time it is said."""
        self._log(logging.WARNING, what)

    def _log(self, level: int, what: str) -> None:
        if what not in self.said:
            self.said.add(what)
            logger.log(level, "LeanGRPOTrainer: %s", what)
