"""Count the FLOPs of a simulated training step: matrix products and attention, as they pass through the simulator.

    python -m benchmarks.lean flops [--recipe trl|lean] [--length 20480]

A product of ``[m, k]`` and ``[k, n]`` takes ``2 m k n`` (torch's own formulas, ``torch.utils.flop_counter``); attention
two products forward and five backward, of which a causal kernel computes the lower triangle only: that half is what is
counted here, where torch's counter takes the square. Elementwise work, norms, the embedding and the unpacking of 4-bit
weights are not counted, and neither is generation: its tokens are not all executed.

All layers of a model are alike, so two models are simulated, of one and of two layers, and what the second has more is
taken as often as the real one has layers. Where the lean trainer's pieces are alike, the simulation executes two of
them, and of alike tiles and chunks a few: what was counted is multiplied.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

#: Phases in which policy training happens; scoring by a reference or of old log-probabilities is told apart.
TRAINING = ("forward", "backward")


class Flops:
    """FLOPs by step and phase; pieces of training planned and executed, and those of the last plan."""

    def __init__(self) -> None:
        self.counted: Counter[tuple[int | None, str]] = Counter()
        self.planned = self.executed = self.last = 0

    def add(self, recorder: Any, count: int) -> None:
        """Add ``count`` in the step and phase that ``recorder`` is in."""
        if count:
            phase, step = recorder.phase_and_step()
            self.counted[step, phase] += count

    def last_step(self) -> dict[str, int]:
        """Return the last step's FLOPs by phase, with pieces that were not executed counted as those that were."""
        last = max(step for step, _ in self.counted if step is not None)
        times = self.planned / self.executed if self.executed else 1
        return {
            phase: round(count * times) for (step, phase), count in self.counted.items() if step == last
        }  # fmt: skip


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Count the FLOPs of one operation; 0 where it is neither a product nor attention."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(func, "overloadpacket", None))
    if formula is None:
        return 0
    count = int(formula(*args, **kwargs, out_val=out))
    names = [argument.name for argument in func._schema.arguments]
    if "is_causal" not in names:
        return count
    place = names.index("is_causal")
    causal = kwargs.get("is_causal", args[place] if place < len(args) else False)
    length = args[names.index("key")].shape[2]
    return count * (length + 1) // (2 * length) if causal else count


@contextmanager
def counting(lean: Mapping[str, Any] | None = None) -> Iterator[Flops]:
    """Count simulations while open; ``lean`` are arguments for ``LeanGRPOConfig`` that no setting has."""
    from memprof.compat.patching import replacing
    from memprof.grpo.loss import chunked_loss
    from memprof.grpo.step import micro_batch
    from memprof.grpo.step import pieces as cutting
    from memprof.simulate.recorder.recorder import FakeRecorder
    from memprof.simulate.shortcuts import rounds as shortcut
    from memprof.simulate.trainer import training

    found = Flops()
    see, plan, fakes = FakeRecorder.see, cutting.plan, training.trl_on_fakes
    alike = shortcut.identical_iterations

    def seen(self: Any, func: Any, args: Any, kwargs: Any, out: Any, *more: Any) -> None:
        found.add(self, flops_of(func, args, kwargs, out))
        see(self, func, args, kwargs, out, *more)

    def all_rounds(recorder: Any, rounds: Any) -> Iterator[slice]:
        """Execute some of the tiles that are alike; count the others as the last of their length."""
        executed, longest, each = 0, rounds[0].stop - rounds[0].start, 0
        for rows in alike(recorder, rounds):
            before = found.counted.total()
            yield rows
            executed += 1
            if rows.stop - rows.start == longest:
                each = found.counted.total() - before
        found.add(recorder, (len(rounds) - executed) * each)

    def planned(*given: Any, **how: Any) -> Any:
        pieces = plan(*given, **how)
        found.last = len(pieces)
        return pieces

    @contextmanager
    def on_fakes(settings: Any, config: Any, session: Any = None) -> Iterator[None]:
        """Count products that the simulation leaves out because they allocate nothing."""
        import trl.kernels.chunked_logprob as kernels

        def product(total: Any, a: Any, b: Any, **_: Any) -> None:
            found.add(session.fake_recorder, 2 * a.shape[0] * a.shape[1] * b.shape[1])

        with fakes(settings, config, session):
            passes, few = chunked_loss.passes_for, micro_batch.plan

            def executed(*given: Any, **how: Any) -> Any:
                pieces = few(*given, **how)
                found.planned += found.last
                found.executed += len(pieces)
                return pieces

            changes = [
                (kernels, "_addmm_fp32", product),
                (chunked_loss, "passes_for", lambda device: replace(passes(device), accumulate=product)),
                (micro_batch, "plan", executed),
            ]
            with replacing(*(changes if settings.device == "cuda" else [])):
                yield

    with (
        replacing(
            (FakeRecorder, "see", seen),
            (cutting, "plan", planned),
            (training, "trl_on_fakes", on_fakes),
            (shortcut, "identical_iterations", all_rounds),
        ),
        told(lean),
    ):
        yield found


@contextmanager
def told(lean: Mapping[str, Any] | None) -> Iterator[None]:
    """Give the simulated lean trainer's config these arguments too, while open."""
    from memprof.compat.patching import replacing
    from memprof.simulate.trainer import build

    given = build.config_of

    def config_of(settings: Any) -> dict[str, Any]:
        return {**given(settings), **(lean or {})}

    with replacing((build, "config_of", config_of)):
        yield


def training_flops(settings: Mapping[str, Any], lean: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Count FLOPs by phase of one optimizer step's training, and of scoring where there is any.

    Args:
        settings: as :class:`memprof.config.settings.Settings`, without generation.
        lean: see :func:`counting`.
    """
    from memprof.config.catalogue import find_config

    config = find_config(settings["model"])
    with tempfile.TemporaryDirectory() as folder:
        one, two = (_counted({**settings, "model": with_layers(config, count, Path(folder))}, lean) for count in (1, 2))
    more = config["num_hidden_layers"] - 1
    return {phase: one[phase] + more * (two[phase] - one[phase]) for phase in two}


def with_layers(config: Mapping[str, Any], count: int, folder: Path) -> str:
    """Write the config of a model of ``count`` layers to a folder below ``folder``."""
    values = {**config, "num_hidden_layers": count}
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:count]
    place = folder / str(count)
    place.mkdir()
    (place / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return str(place)


def _counted(settings: Mapping[str, Any], lean: Mapping[str, Any] | None) -> dict[str, int]:
    from memprof.config.settings import Settings
    from memprof.simulate.run import simulate_settings

    with counting(lean) as found:
        simulate_settings(Settings(**{**settings, "generation": "none"}), stacks=False)
    return found.last_step()


def total(flops: Mapping[str, int]) -> int:
    """Sum the FLOPs of training's phases."""
    return sum(flops.get(phase, 0) for phase in TRAINING)


@click.command(help=__doc__)
@click.option("--recipe", default="lean", type=click.Choice(["trl", "lean"]))
@click.option("--length", default=20_480, help="Tokens of a sequence, 512 of them the prompt's.")
def main(recipe: str, length: int) -> None:
    found = training_flops(
        {"model": "meta-llama/Llama-3.1-8B-Instruct", "dtype": "bfloat16", "lora_r": 16, "prompt_length": 512,
         "completion_length": length - 512, "recipe": recipe}
    )  # fmt: skip
    for phase, count in found.items():
        print(f"{phase}: {count / 1e15:.3f} PFLOP")
    print(f"training: {total(found) / 1e15:.3f} PFLOP")
