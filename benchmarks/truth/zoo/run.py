"""Fetch public training programs by git, run each at a small size, and score attribution on them.

    python -m benchmarks.truth zoo --out DIR [--checkouts DIR] [--half first|second] [NAME ...]

The rows are in ``zoo/rows.toml``. A program runs in a process of its own, without a network where the machine allows
that. Where a repository can't be fetched, the row is skipped. Nothing of the programs is stored in this repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.truth.score import Case, Score, report, score_case
from benchmarks.truth.zoo.rows import Row, read_rows
from memprof.vocabulary import Evidence

CERTAIN = (Evidence.OWNER.value, Evidence.METADATA.value, Evidence.STACK.value)
_SECONDS = 400


def fetch(row: Row, folder: Path, checkouts: Path | None) -> bool:
    """Put the row's commit under ``folder``, from a bare copy ``OWNER+NAME/repo`` in ``checkouts`` or by git."""
    local = None if checkouts is None else checkouts / row.repository.replace("/", "+") / "repo"
    if local is not None and local.exists():
        names = subprocess.run(
            ["git", "--git-dir", local, "ls-tree", "-r", "--name-only", row.commit],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for name in names:  # one by one: a copy may lack its largest files
            if not name.endswith((".py", ".toml", ".json", ".yaml", ".txt", ".cfg")):
                continue
            found = subprocess.run(["git", "--git-dir", local, "show", f"{row.commit}:{name}"], capture_output=True)
            if found.returncode == 0:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(found.stdout)
        return True
    url = f"https://github.com/{row.repository}.git"
    steps = (
        ["git", "init", "-q", folder],
        ["git", "-C", folder, "fetch", "-q", "--depth=1", url, row.commit],
        ["git", "-C", folder, "checkout", "-q", "FETCH_HEAD"],
    )
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        return all(subprocess.run(step, capture_output=True, timeout=300, env=quiet).returncode == 0 for step in steps)
    except subprocess.TimeoutExpired:
        return False


def run(row: Row, checkouts: Path | None, out: Path) -> bool:
    """Run one row; print why where it can't be run."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / row.name
        checkout.mkdir()
        if not fetch(row, checkout, checkouts):
            print(f"{row.name}: skipped; {row.repository} can't be fetched", file=sys.stderr)
            return False
        alone = ["unshare", "-rn"] if shutil.which("unshare") else []
        if alone and subprocess.run([*alone, "true"], capture_output=True).returncode:
            alone = []
        root = Path(__file__).resolve().parents[3]
        command = [*alone, sys.executable, "-m", "benchmarks.truth.zoo.child", row.name, str(checkout), str(out)]
        path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, cwd=root, env={**os.environ, "PYTHONPATH": path}
        )
        if done.returncode:
            print(f"{row.name}: failed; {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return done.returncode == 0


def wrong_and_certain(cases: list[Case]) -> tuple[int, int]:
    """Return the bytes at the peaks that are wrong though called certain, and all bytes."""
    peaks = [case.instants["peak"] for case in cases]
    wrong = sum(score.evidence[kind, False] for score in peaks for kind in CERTAIN)
    return wrong, sum(score.total for score in peaks)


def in_wrong_category(score: Score) -> int:
    """Return the bytes by which the categories' totals are too large: what a report's table shows wrongly."""
    said: Counter[str] = Counter()
    for (truth, answer), size in score.confusion.items():
        said[answer] += size
        said[truth] -= size
    return sum(size for size in said.values() if size > 0)


def summary(cases: list[Case]) -> str:
    """Say in a line how much is right, of each program's noticeable categories too."""
    peaks = [case.instants["peak"] for case in cases]
    total = sum(score.total for score in peaks)
    recalls = [recall for score in peaks for recall in score.recalls().values()]
    good = sum(recall >= 0.95 for recall in recalls)
    wrong, _ = wrong_and_certain(cases)
    shifted = sum(map(in_wrong_category, peaks))
    return (
        f"{len(cases)} recordings: {100 * sum(s.right for s in peaks) / total:.2f}% of the peaks' bytes right, "
        f"lowest {100 * min(s.accuracy for s in peaks):.2f}%; {100 * (1 - shifted / total):.2f}% in the categories' "
        f"totals; {good} of {len(recalls)} noticeable categories with a recall of 95% or more; "
        f"certain and wrong {100 * wrong / total:.3f}%"
    )


def report_half(which: str, paths: Sequence[Path], confusion: bool = False) -> None:
    """Score the labelled recordings of one half at their peaks, and print what was found."""
    cases = [score_case(path) for path in paths]
    for case in cases:
        case.instants = {"peak": case.instants["peak"]}
    if cases:
        print(f"\n{which} half")
        report(cases, phases=False, confusion=confusion)
        print(f"\n{summary(cases)}")


@click.command(help=__doc__)
@click.argument("names", nargs=-1, metavar="[NAME ...]")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the labelled recordings.")
@click.option("--checkouts", type=click.Path(path_type=Path), help="Folder of bare copies OWNER+NAME/repo.")
@click.option("--half", type=click.Choice(["first", "second"]), help="Only this half.")
@click.option("--score-only", is_flag=True, help="Score what is in the folder.")
def main(names: tuple[str, ...], out: Path, checkouts: Path | None, half: str | None, score_only: bool) -> None:
    rows = [r for r in read_rows().values() if (not names or r.name in names) and half in (None, r.half)]
    if not score_only:
        rows = [row for row in rows if run(row, checkouts, out.resolve())]
    for which in ("first", "second"):
        report_half(which, [p for r in rows if r.half == which for p in sorted(out.glob(f"{r.name}.*.pickle"))])
