"""Compare predictions with real runs, with formulas, with other estimators and with what people claim."""

from __future__ import annotations

from benchmarks.subcommands import group_of

main = group_of(
    "benchmarks.simulator",
    __doc__,
    {
        "gpu": ("comparisons:gpu", "Simulate what other people captured on GPUs."),
        "cpu": ("comparisons:cpu", "Record small TRL runs on this CPU and simulate them."),
        "table": ("comparisons:print_table", "Print what was compared; update the expected error."),
        "real-step": ("real_step", "Compare a real TRL step on the CPU with its simulation, in order."),
        "decisions": ("decisions", "Count fits-or-not verdicts that are right and wrong."),
        "emulated": ("emulated.matrix", "Run TRL on emulated GPUs, with the real allocator, and simulate the same."),
        "emulated-edges": ("emulated.edges", "Find the smallest cards that runs survive, and hold verdicts to them."),
        "emulated-generation": ("emulated.generation", "Generate long completions on an emulated GPU."),
        "emulated-kernels": ("emulated.kernels", "Record what CUDA's kernels allocate, for tests/simulate."),
        "programs": ("programs", "Simulate public programs that were measured on GPUs."),
        "published": ("published", "Simulate what others measured on GPUs and described."),
        "fields": ("fields", "Count what memprof does with the fields of configurations."),
        "rivals": ("rivals", "Ask other estimators about the same configurations."),
        "shortcuts": ("shortcuts", "Measure what each shortcut saves, in CPU seconds."),
        "speed": ("speed", "Time simulations, here and in another checkout, in CPU seconds."),
        "time": ("time", "Hold estimated times against published ones."),
        "rough": ("rough", "Compare formulas with simulations, for docs/grpo-memory.md."),
        "claims": ("claims", "Check claims about GRPO's memory, for benchmarks/measurements.md."),
    },
)

if __name__ == "__main__":
    main(prog_name=main.name)
