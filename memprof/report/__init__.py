"""The typed model of memprof's JSON: reports, comparisons, plans and other answers, each a frozen ``msgspec.Struct``.

Bytes are plain integers, times are microseconds on the recording's own clock. A field that a file of an older
memprof may lack has a default; a field that is ``None`` by default is left out of the JSON when it is ``None``.
"""

from memprof.report.report import Report

__all__ = ["Report"]
