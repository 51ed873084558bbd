"""Compare what advice predicts with what happens when it is followed."""

from __future__ import annotations

from benchmarks.subcommands import group_of

main = group_of(
    "benchmarks.advice",
    __doc__,
    {
        "real": ("real", "Train on the CPU, follow the advice, train again."),
        "simulated": ("simulated", "Compare estimates with simulations at full size."),
        "closed-loop": ("closed_loop", "Let runs die, follow what is said to be enough, and see whether they live."),
    },
)

if __name__ == "__main__":
    main(prog_name=main.name)
