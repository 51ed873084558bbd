"""Name the data of other packages that memprof passes on: their keys are not memprof's, and no value is checked here.

What memprof reads of such data is validated where it is read, into classes with fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Positional arguments of a call to another package, or from it.
Args = tuple[Any, ...]
#: Keyword arguments of a call to another package, or from it.
Kwargs = dict[str, Any]
#: A whole snapshot as plain data: what ``torch.cuda.memory._snapshot()`` returns, in a file with memprof's own key.
SnapshotFile = dict[str, Any]
#: An event, a segment, a block or a frame in a :data:`SnapshotFile`.
RawRecord = dict[str, Any]
#: Values of another package's configuration by its names (``GRPOConfig``, ``LoraConfig``, a model's ``config.json``),
#: or of a recording that has them.
ConfigValues = Mapping[str, Any]
