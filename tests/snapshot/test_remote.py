"""Recordings that lie elsewhere: read from memory and from a real web server, equal to the same files on this disk."""

from __future__ import annotations

import base64
import functools
import gzip
import http.server
import json
import pickle
import socket
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path, PurePath
from typing import Any

import pytest

from memprof.advice.analyze_with_advice import ReportBuilder
from memprof.analysis.ranks.reading import RanksReader, read_ranks
from memprof.cli.progress import read_of
from memprof.errors import UsageError
from memprof.report.codec import to_json
from memprof.snapshot import load_snapshot, remote
from memprof.snapshot.remote import RemotePath, place_of, walk
from tests.cli.test_cli import call, report_of
from tests.cli.test_report_ranks import record

fsspec = pytest.importorskip("fsspec")
SECRET = "s3cr3t"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder: two ranks and, in a folder of another step, packed, one more."""
    folder = tmp_path / "run"
    for rank, more in ((0, 2), (1, 10)):
        record(folder / f"step-000002.rank-{rank}.pickle", more, rank=rank, world_size=2)
    with gzip.open(folder / "one.pickle.gz", "wb") as packed:
        packed.write((folder / "step-000002.rank-1.pickle").read_bytes())
    return folder


@pytest.fixture
def stored(run: Path) -> str:
    """The same in a store in memory."""
    system = fsspec.filesystem("memory")
    for path in run.iterdir():
        system.pipe(f"/bucket/run/{path.name}", path.read_bytes())
    return "memory://bucket/run"


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves files to who logs in, or brings a signature; as Python's own server, without ranges."""

    login, query = "", ""

    def do_GET(self) -> None:
        self._if_allowed(super().do_GET)

    def do_HEAD(self) -> None:
        self._if_allowed(super().do_HEAD)

    def _if_allowed(self, then: Any) -> None:
        given = self.headers.get("Authorization", "")
        asked = "Basic " + base64.b64encode(self.login.encode()).decode() if self.login else given
        if given != asked or self.query not in self.path:
            self.send_error(403, f"not with {given} {self.path}")
        else:
            then()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def served(run: Path) -> Iterator[tuple[str, type[Server]]]:
    """The same on a web server of this machine."""
    pytest.importorskip("aiohttp")

    class Handler(Server):
        pass

    handler = functools.partial(Handler, directory=str(run.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/run", Handler
        server.shutdown()


def without_places(report: Any) -> Any:
    """A report without where its files lie."""
    return json.loads(json.dumps(report), object_hook=lambda d: {k: v for k, v in d.items() if k not in _PLACES})


_PLACES = ("files", "file", "notes")


@pytest.mark.parametrize("name", ["step-000002.rank-1.pickle", "one.pickle.gz"])
def test_a_report_is_that_of_the_file(run: Path, stored: str, served: tuple[str, Any], name: str) -> None:
    here = report_of(run / name)
    for place in (stored, served[0]):
        there = report_of(f"{place}/{name}")
        assert there["source"]["files"] == [f"{place}/{name}"]
        assert there["notes"] == here["notes"]
        assert without_places(there) == without_places(here)
        sizes = [load_snapshot(path).traces[0].size.tolist() for path in (f"{place}/{name}", run / name)]
        assert sizes[0] == sizes[1]


def test_without_the_scanner_it_is_the_same(run: Path, stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPROF_NATIVE", "0")
    name = "step-000002.rank-1.pickle"
    assert without_places(report_of(f"{stored}/{name}")) == without_places(report_of(run / name))


def test_a_folder_is_a_run(run: Path, stored: str, served: tuple[str, Any]) -> None:
    here = report_of(run)
    for place in (stored, served[0]):
        there = report_of(place)
        assert [r["rank"] for r in there["ranks"]] == [0, 1]
        assert without_places(there) == without_places(here)
        assert [r["file"] for r in there["ranks"]] == [f"{place}/step-000002.rank-{n}.pickle" for n in (0, 1)]


def test_other_processes_open_it_themselves(run: Path, served: tuple[str, Any]) -> None:
    url, handler = served
    handler.login = f"user:{SECRET}"
    place = place_of(url.replace("://", f"://user:{SECRET}@"))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        read = read_ranks([place], RanksReader(ReportBuilder()), executor=executor)
    assert [rank.peak.active_bytes for rank in read.report.ranks] == [6 << 20, 14 << 20]
    assert SECRET not in to_json(read.report)


@pytest.mark.parametrize("command", ["report", "explain", "advise", "compare", "oom", "simulate"])
def test_every_command_that_reads_snapshots_reads_it(stored: str, command: str) -> None:
    if command == "simulate":
        pytest.importorskip("trl")
    rank = f"{stored}/step-000002.rank-1.pickle"
    given = {
        "advise": ["--estimate", stored],
        "compare": [rank, f"{stored}/step-000002.rank-0.pickle"],
        "oom": [rank],
        "simulate": ["--like", rank],
    }.get(command, [rank])
    result = call(command, *given)
    if command in ("oom", "simulate"):  # it was read: it holds no message, and no configuration
        assert result.exit_code == 3
        assert f"{rank} contains no" in result.output or f"{rank}: " in result.output
        assert "cannot be read" not in result.output
        assert "no such file" not in result.output
    else:
        assert result.exit_code == 0, result.output
        assert "14.0 MiB" in result.output or "0.01" in result.output


def test_lengths_are_read_there(stored: str) -> None:
    from memprof.simulate.lengths import read_lengths

    fsspec.filesystem("memory").pipe("/bucket/lengths.txt", b"10\n20\n")
    assert read_lengths("memory://bucket/lengths.txt", 100).values == (10, 20)


def test_logins_and_signatures_open_and_are_not_printed(served: tuple[str, Any], tmp_path: Path) -> None:
    url, handler = served
    handler.login, handler.query = f"user:{SECRET}", f"X-Signature={SECRET}"
    given = url.replace("://", f"://user:{SECRET}@") + f"/step-000002.rank-1.pickle?X-Signature={SECRET}"
    page = tmp_path / "page.html"
    told = call("report", given, "-o", page, "--json", tmp_path / "a.json")
    assert told.exit_code == 0, told.output
    for text in (told.output, page.read_text(encoding="utf-8"), (tmp_path / "a.json").read_text(encoding="utf-8")):
        assert SECRET not in text
    for wrong in (given.replace(f"?X-Signature={SECRET}", f"?X-Signature={SECRET}-old-{SECRET}"), given):
        handler.query = "X-Signature=another"
        told = call("report", wrong)
        assert told.exit_code == 3
        assert "403" in told.output
        assert SECRET not in told.output


@pytest.mark.parametrize(
    ("url", "code", "sentence"),
    [
        ("memory://bucket/run/none.pickle", 3, "no such file"),
        ("memory://nowhere", 3, "no such file"),
        ("nosuch://bucket/x.pickle", 2, "fsspec cannot open nosuch://"),
        ("s3:///x.pickle", 2, "no URL of one file or folder"),
        ("zip://x.pickle::zip://y.zip::s3://bucket/z.zip", 2, "no URL of one file or folder"),
        ("zip://none.pickle::memory://bucket/run.zip", 3, "no such file"),
    ],
)
def test_mistakes_are_told_in_a_sentence(stored: str, url: str, code: int, sentence: str) -> None:
    told = call("report", url)
    assert told.exit_code == code
    assert sentence in told.output
    assert "Traceback" not in told.output


def test_a_server_that_is_not_there_is_no_missing_file() -> None:
    pytest.importorskip("aiohttp")
    told = call("report", f"http://user:{SECRET}@127.0.0.1:1/x.pickle")
    assert told.exit_code == 3
    assert "no such file" not in told.output
    assert SECRET not in told.output


def test_a_connection_that_breaks_ends_in_a_sentence(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFile

    def broken(*_: Any) -> bytes:
        raise RuntimeError(f"the socket to https://user:{SECRET}@host/x?sig={SECRET} was closed")

    monkeypatch.setattr(MemoryFile, "read", broken)
    told = call("report", f"{stored}/step-000002.rank-1.pickle")
    assert told.exit_code == 3
    assert "cannot be read" in told.output
    assert "was closed" in told.output
    assert SECRET not in told.output


def test_a_run_in_an_archive(run: Path, stored: str, tmp_path: Path) -> None:
    archive = tmp_path / "run.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for path in run.iterdir():
            packed.write(path, f"out/{path.name}")
    fsspec.filesystem("memory").pipe("/bucket/run.zip", archive.read_bytes())
    here = without_places(report_of(run))
    for place in (archive, "memory://bucket/run.zip"):
        assert without_places(report_of(f"zip://out::{place}")) == here
        assert without_places(report_of(f"zip://::{place}")) == here
        one = report_of(f"zip://out/one.pickle.gz::{place}")
        assert one["source"]["files"] == [f"zip://out/one.pickle.gz::{place}"]
    inner = place_of(f"zip://out/one.pickle.gz::{archive}")
    assert pickle.loads(pickle.dumps(inner)) == inner
    assert str(inner.parent) == f"zip://out::{archive}"


def test_a_login_of_an_archive_is_not_printed() -> None:
    place = place_of(f"zip://a/x.pickle::https://user:{SECRET}@host/run.zip?sig={SECRET}")
    assert isinstance(place, RemotePath)
    assert (SECRET in str(place), str(place)) == (False, "zip://a/x.pickle::https://host/run.zip")
    assert place._url() == f"zip://a/x.pickle::https://user:{SECRET}@host/run.zip?sig={SECRET}"


def test_a_server_that_does_not_say_sizes(run: Path) -> None:
    pytest.importorskip("aiohttp")
    name = "step-000002.rank-1.pickle"

    class Unsized(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()  # the end of the connection ends the file
            self.wfile.write((run / name).read_bytes())

        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Unsized) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        there = report_of(f"http://127.0.0.1:{server.server_port}/{name}")
        server.shutdown()
    assert without_places(there) == without_places(report_of(run / name))


def test_a_store_that_is_silent_is_not_waited_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question waited as long as the store's library: minutes in silence."""
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote, "_SILENT_S", 0.5)
    monkeypatch.setattr(remote, "_SILENT_SINCE", {})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        told = call("report", f"http://127.0.0.1:{silent.getsockname()[1]}/x.pickle")
    assert (told.exit_code, "no answer in 0.5 s" in told.output) == (3, True)
    assert len(told.output.strip().split("\n")) == 1


def test_what_has_been_read_is_shown(stored: str, run: Path) -> None:
    """A gigabyte took minutes in silence."""
    name = "step-000002.rank-1.pickle"
    told: list[tuple[int, int | None]] = []
    with remote.reporting_reads(lambda n, size: told.append((n, size))):
        load_snapshot(place_of(f"{stored}/{name}"))
    size = (run / name).stat().st_size
    assert (size, size) in told
    assert (read_of(5 << 20, 10 << 20), read_of(5 << 20, None)) == ("5.00 MiB of 10.00 MiB", "5.00 MiB")


def test_nothing_is_written_there(stored: str) -> None:
    told = call("report", stored, "--keep-json")
    assert told.exit_code == 2
    assert "can only be read" in told.output
    with pytest.raises(OSError, match="only reads"):
        place_of(f"{stored}/new").open("wb")


def test_without_fsspec_the_extra_is_named(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    told = call("report", f"{stored}/step-000002.rank-1.pickle")
    assert told.exit_code == 2
    assert "needs fsspec" in told.output
    assert "[remote]" in told.output


def test_it_speaks_as_a_path(run: Path, stored: str) -> None:
    there = place_of(stored)
    inner = there / "step-000002.rank-1.pickle"
    assert str(inner) == f"{stored}/step-000002.rank-1.pickle"
    assert (inner.name, inner.suffix, str(inner.parent)) == ("step-000002.rank-1.pickle", ".pickle", stored)
    assert inner.relative_to(there) == PurePath("step-000002.rank-1.pickle")
    assert str(inner.with_suffix(".json")) == f"{stored}/step-000002.rank-1.json"
    assert pickle.loads(pickle.dumps(inner)) == inner
    assert len({inner, place_of(str(inner))}) == 1
    names = sorted(path.name for path in run.iterdir())
    assert [path.name for path in there.iterdir()] == names
    assert [files for _, _, files in walk(there)] == [names] == [sorted(f) for _, _, f in walk(run)]
    assert inner.read_bytes() == (run / inner.name).read_bytes()
    assert inner.stat().st_size == (run / inner.name).stat().st_size
    assert inner.stat().st_mtime_ns > 0
    assert place_of("file:///tmp/x.pickle") == Path("/tmp/x.pickle")
    assert place_of("C:/x.pickle") == Path("C:/x.pickle")
    with pytest.raises(ValueError, match="not below"):
        there.relative_to(inner)
    with pytest.raises(UsageError):
        place_of("s3://")
