"""Recording: watch a run's memory and write a snapshot. Nothing here imports torch before something is recorded.

The package shares its name with its main function, and importing any module of it makes ``memprof.record`` the
package: so the package can be called, and ``from memprof import record`` works whatever was imported before.
"""

from __future__ import annotations

import sys
from types import ModuleType

from memprof.record.api import record
from memprof.record.phases import phase

__all__ = ["phase", "record"]


class _CallablePackage(ModuleType):
    __call__ = staticmethod(record)


sys.modules[__name__].__class__ = _CallablePackage
