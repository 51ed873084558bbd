"""Break memprof on purpose, and see that the run, or the reader, does not notice more than a sentence."""

from __future__ import annotations

from benchmarks.subcommands import group_of

main = group_of(
    "benchmarks.faults",
    __doc__,
    {
        "inject": ("inject", "Raise an exception in every function of memprof's that a GRPO run calls."),
        "fuzz": ("mutate", "Change snapshots and reports, and give them to the commands."),
    },
)

if __name__ == "__main__":
    main(prog_name=main.name)
