"""Measure what recording costs, and check that it changes nothing and records what formulas say."""

from __future__ import annotations

from benchmarks.subcommands import group_of

main = group_of(
    "benchmarks.recording",
    __doc__,
    {
        "overhead": ("overhead", "Time the demo's step unwatched, watched and recorded."),
        "unrecorded": ("unrecorded", "Time steps that are not recorded beside steps without memprof."),
        "long-run": ("long_run", "Count 10,000 steps; fail if memprof's memory grows."),
        "many-steps": ("many_steps", "Train 10,000 steps in turns with trainings without memprof: time, RSS, disk."),
        "sandboxes": ("sandboxes", "Train with rewards that run code in children, as without memprof."),
        "bit-equal": ("bit_equal", "Compare training with and without the callback, bit for bit."),
        "check-demo": ("check_demo", "Hold the files of make demo to closed forms."),
    },
)

if __name__ == "__main__":
    main(prog_name=main.name)
