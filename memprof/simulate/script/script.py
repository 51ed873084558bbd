"""Simulate an existing training script: run it up to its ``trainer.train()``, and simulate that instead.

The script's own trainer object is built and trained for two steps on fake tensors: its class, its loss, its arguments,
its adapter. Nothing is trained, and nothing after ``train()`` is run. Where that object cannot be executed, its
arguments are simulated with TRL's own trainer, and a note says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.compat import missing, require
from memprof.config.fits import stated_error
from memprof.config.gpus import Gpu
from memprof.errors import InputError
from memprof.report.codec import to_builtins
from memprof.report.run import KnownSettings
from memprof.simulate.run import simulate, simulate_settings

if TYPE_CHECKING:
    from memprof.foreign import SnapshotFile
    from memprof.simulate.script.run import ScriptRun

_TRAINERS = ("DPOTrainer", "KTOTrainer", "RewardTrainer", "RLOOTrainer", "SFTTrainer")


def simulate_script(
    script: Path,
    arguments: Sequence[str],
    changes: Mapping[str, Any],
    *,
    device: str = "cuda",
    capacity: int | None = None,
    gpu: Gpu | None = None,
    stacks: bool = True,
    allow_unsimulated: bool = False,
) -> SnapshotFile:
    """Run a script until it trains, and simulate that; the result is a raw snapshot.

    Args:
        script, arguments: the file and its command line.
        changes: settings that replace the script's own (:data:`memprof.config.from_trainer.CHANGEABLE`).
        allow_unsimulated: leave arguments out that change memory and are not simulated, instead of an error.
        device, capacity, gpu, stacks: as :func:`memprof.simulate.run.simulate`.

    Raises:
        InputError: the script fails before it trains, or does not train, or cannot be simulated.
        UsageError: the installed TRL, transformers ... are not those this was written for.
    """
    if not script.is_file():
        raise InputError(f"{script}: no such script.")
    require("script")
    # Loaded before the fake world opens: they make constants, and trainers' classes are looked for.
    import transformers.masking_utils  # noqa: F401
    import trl

    for name in _TRAINERS:  # a class that a script loads later is not intercepted
        getattr(trl, name, None)
    from memprof.grpo import LeanGRPOTrainer, LeanRLOOTrainer  # noqa: F401
    from memprof.simulate.script.run import NotExecutable, ScriptRun

    found = ScriptRun(script, arguments, changes, device, gpu, allow_unsimulated)
    found.notes += missing("script")
    try:
        raw = simulate(
            found.run,
            device=device,
            attention=None if changes.get("attn", "auto") == "auto" else changes["attn"],
            padding=changes.get("padding") == "worst",
            selected=found.selected,
            alloc_conf=changes.get("alloc_conf", ""),
            capacity=capacity,
            gpu=gpu,
            stacks=stacks,
        )
    except NotExecutable as failed:
        if failed.settings is None:
            raise InputError(f"{script.name}: {failed.reason}") from failed
        raw = simulate_settings(failed.settings, capacity=capacity, gpu=gpu, stacks=stacks)
        whose = "memprof's lean trainer" if failed.settings.lean else "TRL's"
        how = f"the script's own trainer could not be executed ({failed.reason}); {whose} was, with its arguments"
    else:
        how = f"the script's own {found.trainer.name} was built and trained for two steps on fake tensors"
    return _told(raw, found, how, gpu)


def _told(raw: SnapshotFile, found: ScriptRun, how: str, gpu: Gpu | None) -> SnapshotFile:
    """Note in the snapshot what was simulated of the script, and how."""
    extra = raw["memprof"]
    if found.left_out:
        extra["config"] = {**(extra["config"] or {}), "left_out": found.left_out}
    if found.trainer.settings is not None:
        settings = found.trainer.settings.with_(left_out=(*found.trainer.settings.left_out, *found.left_out))
        extra["config"] = {**(extra["config"] or {}), **settings.to_dict()}
    if found.left_out or found.trainer.settings is not None:
        extra["expected_error"] = to_builtins(stated_error(KnownSettings.of(extra["config"]), card=gpu))
    told = {"script": found.script.name, "trainer": found.trainer.name}
    if found.trainer.settings is not None and found.trainer.settings.trainer == "rloo":
        told["trainer_kind"] = "rloo"
    extra["config"] = {**(extra["config"] or {}), **told}
    notes = [*(extra.get("notes") or []), f"{how}; nothing after train() was run", *found.notes]
    extra["notes"] = list(dict.fromkeys(notes))
    return raw
