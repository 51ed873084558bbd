"""Measure the lean trainer beside TRL's: memory, FLOPs, time and the training itself."""

from __future__ import annotations

from benchmarks.subcommands import group_of

main = group_of(
    "benchmarks.lean",
    __doc__,
    {
        "memory": ("memory", "Simulate memory, host memory and FLOPs of both trainers."),
        "flops": ("flops", "Count the FLOPs of a simulated training step."),
        "techniques": ("techniques", "Simulate each technique alone and without the others."),
        "longest": ("longest", "Search the longest sequences that fit 24 GB and 80 GB."),
        "track": ("track", "Train both on the same completions; compare losses, rewards, norms."),
        "speed": ("speed", "Time forward and backward of one micro-batch; trace its peak."),
        "crossing": ("speed:crossing", "Find the length from which a micro-batch is as fast as TRL's."),
        "families": ("equality.families", "Compare a step with TRL's over every causal family."),
        "survival": ("equality.survival", "Take memory away on the emulated device; compare what was trained."),
        "fused-loss": ("fused_loss", "Compare fused log-probabilities with TRL's, Liger's and plain logits."),
        "tables": ("tables", "Print the tables of the results that are kept."),
    },
)

if __name__ == "__main__":
    main(prog_name=main.name)
