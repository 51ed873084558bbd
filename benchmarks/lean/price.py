"""Tell what a simulated row of the memory table costs: how its sequences generate, and the estimated time of its step.

Time is memprof's own estimate (:mod:`memprof.simulate.step_time`), of one simulation on any GPU: what is computed and
moved stays the same. An offloaded cache of keys and values, which no setting of the simulator has, is modelled here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Price:
    """Hold a simulation's price.

    ``passes`` and ``decode_steps`` are of one generation: a step of all sequences of a pass counts once, and a rolling
    batch has no passes. ``seconds`` has, by GPU, the estimated seconds of the step (``step``) and of each phase.
    """

    passes: int | None = None
    decode_steps: int | None = None
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"passes": self.passes, "decode_steps": self.decode_steps, "estimated_seconds": self.seconds}


@contextmanager
def pricing(cards: Sequence[str], *, offloaded_cache: bool = False) -> Iterator[Price]:
    """Note the price of the simulation that runs inside, with its step's time on each of ``GPUs``.

    Args:
        GPUs: names in :mod:`memprof.config.gpus`; the simulated one is among the GPUs whose speed is known.
        offloaded_cache: keep keys and values on the host, as ``GRPOConfig(cache_implementation="offloaded")`` does.
    """
    from memprof.compat.patching import replacing
    from memprof.simulate import run
    from memprof.simulate.generation import lean_generation
    from memprof.simulate.trainer import rollout

    found = Price()
    generate, roll, time_of = rollout._generate, lean_generation._roll, run._time_of

    def generated(trainer: Any, settings: Any, session: Any, batch: int, passes: int) -> None:
        found.passes, found.decode_steps = passes, passes * settings.completion_length
        recorder = session.fake_recorder
        with _cache_on_host(recorder) if offloaded_cache else nullcontext():
            generate(trainer, settings, session, batch, passes)

    def rolled(*given: Any) -> Any:
        work = roll(*given)
        found.passes, found.decode_steps = None, work.steps
        return work

    def timed(session: Any, gpu: Any, config: Any) -> Any:
        work = session.fake_recorder.work
        phases = work.of_step(work.last_step())
        found.seconds.update({card: _seconds(phases, card) for card in cards})
        _note_engine(found, phases, config)
        return time_of(session, gpu, config)

    with replacing(
        (rollout, "_generate", generated), (lean_generation, "_roll", rolled), (run, "_time_of", timed)
    ):
        yield found


def _seconds(phases: Any, card: str) -> dict[str, float]:
    from memprof.config.gpus import find_gpu
    from memprof.simulate.step_time import estimated_time

    told = estimated_time(phases, find_gpu(card))
    return {} if told is None else {"step": told.step_s, **told.phases}


def _note_engine(found: Price, phases: Any, config: Any) -> None:
    """Read how a modelled engine generates from what it did: the prompts in one go, then its decode steps."""
    fused = phases["generate"].fused if "generate" in phases else {}
    if fused:
        found.decode_steps = round(sum(fused.values())) - 1
        found.passes = found.decode_steps // int(config.completion_length)


@contextmanager
def _cache_on_host(recorder: Any) -> Iterator[None]:
    """Keep the cache as transformers' offloading does, while open (``Cache.update``, ``prefetch`` and ``offload``).

    A layer's keys and values come to the device while the layer before it runs, and leave when its own have grown.
    """
    from transformers.cache_utils import Cache

    from memprof.compat.patching import replacing

    update = Cache.update

    def updated(self: Any, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        for number in (layer, (layer + 1) % max(1, len(self.layers))):  # its own, if nothing has brought it yet
            if number < len(self.layers) and getattr(self.layers[number], _AWAY, False):
                _move(self.layers[number], away=False)
        grown = update(self, keys, values, layer, *args, **kwargs)
        with recorder.storages.on_host():
            _move(self.layers[layer], away=True)
        return grown

    with replacing((Cache, "update", updated)):
        yield


def _move(layer: Any, *, away: bool) -> None:
    import torch

    layer.keys, layer.values = torch.empty_like(layer.keys), torch.empty_like(layer.values)
    setattr(layer, _AWAY, away)


_AWAY = "_memprof_away"
