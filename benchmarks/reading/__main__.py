"""Measure what reading recordings costs: large files, pages, many ranks, the command line's start."""

from __future__ import annotations

from benchmarks.subcommands import group_of

main = group_of(
    "benchmarks.reading",
    __doc__,
    {
        "large-files": ("large_files", "Read 10k to 10M events, compared with PyTorch's viewer."),
        "page": ("page", "Measure a page's bytes, first paint, ready and zoom in Chromium."),
        "ranks": ("ranks", "Write and open the page of 8, 128 and 1024 ranks."),
        "startup": ("startup", "Time memprof --help beside an empty interpreter."),
        "fuzz-scan": ("fuzz_scan", "Fuzz the native scanner under sanitizers (needs gcc or clang)."),
    },
)

if __name__ == "__main__":
    main(prog_name=main.name)
