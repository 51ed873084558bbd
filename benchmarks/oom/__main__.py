"""Score memprof's reading of out-of-memory messages."""

from __future__ import annotations

from benchmarks.subcommands import group_of

main = group_of(
    "benchmarks.oom",
    __doc__,
    {
        "texts": ("texts", "Score memprof oom on a folder of real texts."),
        "growth": ("growth", "Time the patterns on hostile text, and long logs."),
    },
)

if __name__ == "__main__":
    main(prog_name=main.name)
