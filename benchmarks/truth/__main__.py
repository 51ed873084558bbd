"""Make snapshots whose every byte is labelled, and score attribution on them."""

from __future__ import annotations

from benchmarks.subcommands import group_of

main = group_of(
    "benchmarks.truth",
    __doc__,
    {
        "generate": ("generate", "Run the cases and write snapshots with their truth."),
        "zoo": ("zoo.run", "Run public programs at a small size and score attribution on them."),
        "small": ("small", "Run small trainings of many kinds and score attribution on them."),
        "score": ("score", "Score attribution on labelled snapshots, by the truth's bytes."),
    },
)

if __name__ == "__main__":
    main(prog_name=main.name)
