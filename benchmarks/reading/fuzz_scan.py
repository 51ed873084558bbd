"""Fuzz the native scanner under AddressSanitizer and UBSan, and compare it with the Python reader.

    python -m benchmarks.reading fuzz-scan --inputs 1000000 [--seed 0] [FILE...]

Mutates small snapshots (``tests/snapshot/corpus``, runs of the allocator's model, the first events of each FILE), feeds
them in pieces of random sizes to ``scan.c`` built with the sanitizers, and reads every input that it accepts with the
Python reader too: the snapshots must be equal, and nothing that Python refuses may be accepted. Prints what was tried;
the first finding ends it. Needs gcc or clang with its sanitizers; the same seed makes the same inputs.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.tabling import ROOT

SOURCE = ROOT / "memprof" / "_native" / "scan.c"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
_LARGEST = 6000  # bytes of a seed: small ones are tried often
_BUILT = "MEMPROF_FUZZED_SCANNER"
_OPCODES = b"}](uesaNt)\x85\x86\x87\x88\x89\x94hjqrKMJ\x8a\x8cX\x8dG\x95.0cRb"


@click.command(help=__doc__)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True))
@click.option("--inputs", default=100_000, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(files: tuple[Path, ...], inputs: int, seed: int) -> None:
    if _BUILT in os.environ:
        fuzz(Path(os.environ[_BUILT]), files, inputs, seed)
        return
    with tempfile.TemporaryDirectory() as folder:
        module = Path(folder) / "scan.so"
        environment = {**sanitized(SOURCE, module), _BUILT: str(module)}
        again = [sys.executable, "-m", "benchmarks.reading", "fuzz-scan", *map(str, files)]
        again += ["--inputs", str(inputs), "--seed", str(seed)]
        sys.exit(subprocess.run(again, env=environment).returncode)


def sanitized(source: Path, module: Path) -> dict[str, str]:
    """Build an extension under the sanitizers; return the environment in which Python can load it."""
    compiler, include = os.environ.get("CC", "gcc"), f"-I{sysconfig.get_paths()['include']}"
    command = [compiler, "-g", "-O1", "-shared", "-fPIC", *SANITIZERS, include, str(source), "-o", str(module)]
    subprocess.run(command, check=True)
    found = [compiler, "-print-file-name=libasan.so"]
    library = subprocess.run(found, check=True, capture_output=True, text=True).stdout.strip()
    checks = {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1", "PYTHONMALLOC": "malloc"}
    return {**os.environ, **checks, "LD_PRELOAD": library}


def fuzz(module: Path, files: tuple[Path, ...], inputs: int, seed: int) -> None:
    """Try inputs on the scanner built at ``module``."""
    install("scan", module)
    dice, seeds = random.Random(seed), _seeds(files)
    accepted, begun = 0, time.process_time()
    for number in range(inputs):
        data = dice.choice(seeds) if number < len(seeds) else mutated(dice, seeds)
        accepted += compared(data, dice)
        if (number + 1) % 50_000 == 0:
            spent = time.process_time() - begun
            print(f"{number + 1:,} inputs, {accepted:,} accepted and equal, {spent:.0f} CPU s", flush=True)
    print(f"{inputs:,} inputs of seed {seed} from {len(seeds)} snapshots: {accepted:,} accepted and equal, no finding")


def compared(data: bytes, dice: random.Random) -> bool:
    """Tell whether the scanner accepts an input; then the Python reader must read the same from it.

    Raises:
        AssertionError: it does not.
    """
    from memprof.errors import InputError
    from memprof.snapshot import snapshot_from_raw
    from memprof.snapshot.rows import scan
    from memprof.snapshot.unpickle import plain_from_bytes
    from tests.snapshot.test_shared_stacks import same

    step = dice.choice((7, *(64,) * 3, *(1 << 20,) * 12))
    found = scan(data[at : at + step] for at in range(0, len(data), step))
    if found is None:
        return False
    try:
        plain, reason = plain_from_bytes(data, "x"), ""
    except InputError as error:
        plain, reason = None, str(error)
    assert not reason, f"Python refuses what was scanned: {reason}: {data!r}"
    results: list[Any] = []
    for raw, rows in (found, (plain, None)):
        try:
            results.append(snapshot_from_raw(raw, rows=rows))
        except InputError as error:
            results.append(error)
    if isinstance(results[0], InputError):  # load_snapshot reads such a file again
        return True
    assert same(*results), f"not the same: {data!r}"
    return True


def mutated(dice: random.Random, seeds: list[bytes]) -> bytes:
    """Return one of the snapshots with a few bytes or opcodes changed, cut, inserted, repeated or spliced in."""
    data = bytearray(dice.choice(seeds))
    for _ in range(dice.choice((1, 1, 1, 2, 3, 6))):
        at = dice.randrange(len(data) + 1)
        what = dice.randrange(7)
        if what == 0:
            data[at : at + 1] = bytes([dice.randrange(256)])
        elif what == 1:
            data[at : at + 1] = bytes([dice.choice(_OPCODES)])
        elif what == 2:
            del data[at : at + dice.randrange(1, 20)]
        elif what == 3:
            data[at:at] = bytes(dice.choices(_OPCODES, k=dice.randrange(1, 6)))
        elif what == 4:
            data[at:at] = data[at : at + dice.randrange(1, 80)]
        elif what == 5:
            other = dice.choice(seeds)
            begin = dice.randrange(len(other))
            data[at : at + dice.randrange(60)] = other[begin : begin + dice.randrange(60)]
        else:
            data[at : at + 4] = dice.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\0\0\x01\0"))
    return bytes(data)


def install(name: str, module: Path) -> None:
    """Let memprof use the extension of this name built at ``module``."""
    name = f"memprof._native.{name}"
    spec = importlib.util.spec_from_file_location(name, module)
    assert spec is not None, module
    assert spec.loader is not None, module
    built = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(built)
    sys.modules[name] = built


def _seeds(files: tuple[Path, ...]) -> list[bytes]:
    from memprof.snapshot.unpickle import read_plain
    from tests.snapshot.exercise import valid
    from tests.snapshot.test_native import shapes

    raws = [pickle.loads(valid()), *shapes()]
    for file in files:
        raw = read_plain(file)
        if isinstance(raw, dict):
            traces = [[{**e, "frames": (e.get("frames") or [])[:3]} for e in t[:6]] for t in raw["device_traces"]]
            segments = [{**s, "blocks": s["blocks"][:2]} for s in raw["segments"][:2]]
            raws.append({**raw, "device_traces": traces, "segments": segments, "memprof": {}})
    corpus = (ROOT / "tests" / "snapshot" / "corpus").iterdir()
    seeds = [data for file in sorted(corpus) if (data := file.read_bytes())[:1] == b"\x80"]
    seeds += [pickle.dumps(raw, protocol=protocol) for raw in raws for protocol in (2, 3, 4, 5)]
    return [data for data in seeds if len(data) < _LARGEST]
