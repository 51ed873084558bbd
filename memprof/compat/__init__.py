"""The only room that names other packages' private things.

``trl.py``, ``transformers.py``, ``torch.py`` ... declare every name memprof patches, calls or reads in those packages;
:func:`require` checks them when a feature is entered, :func:`missing` says what a run has to do without, and
:func:`patching` replaces them for a while. Importing this imports none of the packages.
"""

from __future__ import annotations

from memprof.compat.check import missing, require
from memprof.compat.patching import patching
from memprof.compat.targets import Missing, Target

__all__ = ["Missing", "Target", "missing", "patching", "require"]
