"""Break memprof on purpose, and see that the run it watches does not notice."""

from __future__ import annotations

from benchmarks.subcommands import group_of

main = group_of(
    "benchmarks.faults",
    __doc__,
    {
        "inject": ("inject", "Raise an exception in every function of memprof's that a GRPO run calls."),
        "mutate": ("mutate", "Feed mutated snapshots, reports and counters to the commands that read them."),
    },
)

if __name__ == "__main__":
    main(prog_name=main.name)
