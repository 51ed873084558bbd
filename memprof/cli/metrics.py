"""Serve a run's counters to Prometheus, in the formats that its client library writes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memprof.errors import InputError, MemprofError, UsageError, how_to_install
from memprof.report.base import known

if TYPE_CHECKING:
    from memprof.analysis.counters import Counters

# A counters file's sizes that are metrics of their own; the file's head says what each is.
_SIZES = (
    "peak_allocated", "peak_reserved", "allocated", "reserved", "inactive_split", "cached", "non_torch", "host_rss",
    "host_pinned",
)  # fmt: skip


class Address(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """An address to listen on, ``:9200`` or ``0.0.0.0:9200``; without a host, this machine's own programs only."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        host, colon, port = str(value).rpartition(":")
        if not colon or not port.isdecimal() or not int(port) < 1 << 16:
            self.fail(f"{value!r} is not an address; write :9200 or 0.0.0.0:9200.", param, ctx)
        return host or "127.0.0.1", int(port)


class RunCollector:
    """Read the counters of a run each time Prometheus asks; a run that cannot be read has no samples."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Any]:
        """Yield metric families."""
        from prometheus_client.core import GaugeMetricFamily as Gauge

        from memprof.analysis.counters import read_run

        try:
            ranks = read_run(self._folder)
        except MemprofError:
            ranks = []
        for name in _SIZES:
            family = Gauge(f"memprof_{name}_bytes", f"{name} of the newest step.", labels=["rank"])
            yield _filled(family, (([str(r.rank)], r.newest.size(name)) for r in ranks if r.newest))
        capacity = Gauge("memprof_device_total_bytes", "Memory that the device has.", labels=["rank"])
        yield _filled(capacity, (([str(r.rank)], known(r.about.device_total_bytes)) for r in ranks))
        steps = Gauge("memprof_step", "The newest optimizer step.", labels=["rank"])
        yield _filled(steps, (([str(r.rank)], r.newest.step) for r in ranks if r.newest))
        ended = Gauge("memprof_training_ended", "1 if the training has ended.", labels=["rank"])
        yield _filled(ended, (([str(r.rank)], int(r.ended is not None)) for r in ranks))
        phases = Gauge("memprof_phase_peak_bytes", "Highest allocated bytes of a phase.", labels=["rank", "phase"])
        tables = [(rank, known(rank.newest.phases)) for rank in ranks if rank.newest is not None]
        yield _filled(phases, _labelled(tables))
        categories = Gauge(
            "memprof_category_bytes", "Bytes of a category at the peak that was recorded.", labels=["rank", "category"]
        )
        peaks = [(rank, known(rank.recorded.categories)) for rank in ranks if rank.recorded is not None]
        yield _filled(categories, _labelled(peaks))


def _labelled(tables: Iterable[tuple[Counters, Mapping[str, int] | None]]) -> Iterator[tuple[list[str], int]]:
    """Yield the bytes of each rank's table, with the labels rank and name."""
    for rank, table in tables:
        for name, size in (table or {}).items():
            yield [str(rank.rank), name], size


def _filled(family: Any, samples: Iterable[tuple[list[str], Any]]) -> Any:
    for labels, value in samples:
        if value is not None:
            family.add_metric(labels, float(value))
    return family


def serve(folder: Path, address: tuple[str, int]) -> None:
    """Answer Prometheus until Ctrl-C.

    Raises:
        UsageError: prometheus-client is not installed.
        InputError: nothing can listen on the address.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise UsageError(f"--serve needs prometheus-client: {how_to_install('prometheus')}.") from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(folder))  # type: ignore[arg-type, unused-ignore]
    host, port = address
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise InputError(f"{host}:{port}: cannot be listened on ({error.strerror or error}).") from None
    click.echo(f"http://{host}:{server.server_port}/metrics (end with Ctrl-C)", err=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.shutdown()
        thread.join()
