"""Compare every name that memprof has of other frameworks with their newest wheels."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from benchmarks.frameworks.names import ALSO, DISTRIBUTIONS, stale_names
from benchmarks.frameworks.sources import Source, newest


@click.command(name="python -m benchmarks.frameworks")
@click.option("--wheels", type=click.Path(path_type=Path), help="Keep the downloaded wheels in this folder.")
@click.option("--only", multiple=True, metavar="NAME", help="Look at this framework only, such as verl.")
@click.option(
    "--source", "folders", multiple=True, metavar="NAME=FOLDER", help="Look into a folder instead of a wheel."
)
def main(wheels: Path | None, only: tuple[str, ...], folders: tuple[str, ...]) -> None:
    """Compare every name that memprof has of other frameworks with their newest wheels, and list the stale ones.

    Settings (framework_settings.toml), folders of snapshots (layouts.toml), recipes (docs/frameworks.md) and packages
    (packages.toml) are looked up. Wheels are downloaded without what they depend on, 0.3 GB in all. Ends with 1 if a
    name is stale.
    """
    given = dict(folder.split("=", 1) for folder in folders)
    with tempfile.TemporaryDirectory() as temporary:
        into, sources = wheels or Path(temporary), dict[str, Source]()
        chosen = [name for name in DISTRIBUTIONS if not only or name in only]
        for name in dict.fromkeys([*chosen, *(other for one in chosen for other in ALSO.get(one, ()))]):
            at = Source(name, Path(given[name])) if name in given else newest(name, DISTRIBUTIONS[name], into)
            if at is not None:
                sources[name] = at
        stale = 0
        for name in chosen:
            if (source := sources.get(name)) is None:
                click.echo(f"{name}: not looked at, its wheel could not be downloaded")
                continue
            found = list(stale_names(source, [sources[other] for other in ALSO.get(name, ()) if other in sources]))
            stale += len(found)
            click.echo(f"{name} {source.version}: {len(found) or 'no'} stale names")
            for one in found:
                click.echo(f"  {one.name} ({one.where})")
    sys.exit(1 if stale else 0)


if __name__ == "__main__":
    main(prog_name=main.name)
