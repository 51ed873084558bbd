"""Fill the documentation's tables from the results, write its references and draw its pictures."""

from __future__ import annotations

from benchmarks.subcommands import group_of

main = group_of(
    "benchmarks.docs",
    __doc__,
    {
        "tables": ("tables", "Fill the documentation's tables from the results; --check compares."),
        "cli-reference": ("cli_reference", "Write docs/cli.md from the commands' help; --check compares."),
        "json-reference": ("json_reference", "Write docs/report-json.md from the JSON's schema; --check compares."),
        "report-picture": ("report_picture", "Take the README's picture from a page of the demo."),
        "memory-pictures": ("memory_pictures", "Draw the pictures and figures of docs/grpo-memory.md."),
    },
)

if __name__ == "__main__":
    main(prog_name=main.name)
