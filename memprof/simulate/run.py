"""Simulate one run, given as settings or as a function of one's own, and return its snapshot."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from memprof.allocator.model import AllocatorOutOfMemory, CachingAllocator
from memprof.allocator.settings import OLDEST_FIRST_SINCE, parse_settings
from memprof.compat import missing, require
from memprof.compat import torch as torch_names
from memprof.compat.versions import installed, release
from memprof.config.fits import stated_error
from memprof.config.gpus import Gpu, bfloat16_note, note_of, workspace_bytes
from memprof.config.model_shape import ModelShape
from memprof.config.settings import Settings
from memprof.config.speeds import speed_of
from memprof.errors import InputError, MemprofError, UsageError
from memprof.recording.recorder import DeviceInfo
from memprof.report.codec import to_builtins
from memprof.report.run import KnownSettings
from memprof.report.simulation import EstimatedTime
from memprof.simulate.shortcut_switches import SHORTCUTS, shortcut, unloaded, without

if TYPE_CHECKING:
    from memprof.foreign import SnapshotFile
    from memprof.simulate.recorder.session import FakeSession


def simulate(
    fn: Callable[[FakeSession], Any],
    *,
    config: Mapping[str, object] | None = None,
    device: str = "cuda",
    attention: str | None = None,
    padding: bool = False,
    selected: Callable[[tuple[int, ...]], int] | None = None,
    alloc_conf: str = "",
    capacity: int | None = None,
    gpu: Gpu | None = None,
    world_size: int = 1,
    stacks: bool = True,
    shortcuts: bool = True,
    torch_release: str | None = None,
) -> SnapshotFile:
    """Run ``fn(session)`` on fake tensors and return a raw snapshot, as torch's ``_snapshot()`` would.

    Everything ``fn`` makes on the default device (``cpu``: that is what fake tensors say) is taken for the device's.
    Mark phases with :func:`memprof.phase`; tell the session of models with ``session.add_model(model, "policy")``.

    Args:
        fn: a training loop, or a step of one.
        config: flat facts kept in the snapshot.
        device: ``"cuda"`` follows CUDA's autocast rules, attention kernels and allocator, ``"cpu"`` the CPU's.
        attention: ``flash``, ``efficient`` or ``math``; None chooses as CUDA does.
        padding: whether masks are assumed to hold padding.
        selected: how many entries of a boolean mask of this shape are set; all of them by default.
        alloc_conf: as ``PYTORCH_CUDA_ALLOC_CONF``.
        capacity: bytes the device has for this process; what needs more ends in an OOM the snapshot tells of.
        gpu: whose workspaces and context are assumed.
        world_size: ranks, of which this is the first.
        stacks: keep Python stacks.
        shortcuts: answer operations whose result is known without executing them again.
        torch_release: such as ``"2.11"``: whose allocator is followed where releases differ, which is in the one of
            several free blocks of a size that is taken; the installed torch's by default.

    Raises:
        UsageError: ``alloc_conf`` is malformed, or the installed torch is not one this was written for.
    """
    require("simulate.world")
    from memprof.simulate.fake_cuda.dispatch import OperationTracking
    from memprof.simulate.fake_cuda.fakes import fake_world
    from memprof.simulate.fake_cuda.sdpa_kernels import DEFAULT_CAPABILITY
    from memprof.simulate.recorder.plain_heap import PlainHeap
    from memprof.simulate.recorder.recorder import FakeRecorder
    from memprof.simulate.recorder.reductions import Processors
    from memprof.simulate.recorder.session import FakeSession

    cuda = device == "cuda"
    oldest_first = release(torch_release or installed("torch") or "") >= OLDEST_FIRST_SINCE
    total = gpu.total_bytes if gpu is not None else capacity
    settings = replace(parse_settings(alloc_conf), oldest_first=oldest_first).on_device(total)
    native = shortcut("native") if shortcuts else None
    model = native.allocator if native is not None else CachingAllocator
    heap = model(settings, capacity) if cuda else PlainHeap()
    name = gpu.name if gpu is not None else "no device: simulated"
    recorder = FakeRecorder(heap, DeviceInfo(0, device, name, total), cuda=cuda, stacks="python" if stacks else None)
    if cuda:
        recorder.kernels.workspace = workspace_bytes(gpu)
        if gpu is not None:
            recorder.kernels.processors = Processors(gpu.multiprocessors, gpu.threads_per_processor)
            recorder.work.wanted = speed_of(gpu.name) is not None
    session, known = FakeSession(recorder, config or {}, world_size=world_size), KnownSettings.of(config)
    session.notes += [*missing("simulate.world"), *settings.notes]
    if gpu is not None and cuda:
        session.notes += filter(None, (note_of(gpu), bfloat16_note(gpu, known)))
    session.non_torch = gpu.context_bytes if gpu is not None else None
    capability = gpu.capability if gpu else DEFAULT_CAPABILITY
    with (
        contextlib.nullcontext() if shortcuts else without(*SHORTCUTS),
        fake_world(cuda=cuda, attention=attention, capability=capability, tell=partial(_in_full, session.notes)),
        OperationTracking(recorder, not padding, selected or math.prod),
        _recording(session),
    ):
        fn(session)
    session.notes += unloaded()
    raw = session.to_raw()
    raw["memprof"]["expected_error"] = to_builtins(stated_error(known, card=gpu))
    time = _time_of(session, gpu, known)
    raw["memprof"]["estimated_time"] = None if time is None else to_builtins(time)
    return raw


def _in_full(notes: list[str], why: str) -> None:
    """Note once why attention is computed in full."""
    note = f"Attention is computed in full, with weights of tokens x tokens a head: {why}."
    if note not in notes:
        notes.append(note)


def _time_of(session: FakeSession, gpu: Gpu | None, config: KnownSettings) -> EstimatedTime | None:
    """Estimate the time of the last step, which is the measured one."""
    from memprof.simulate.step_time import estimated_time

    half = config.mixed_precision or config.dtype
    work = session.fake_recorder.work
    return estimated_time(work.of_step(work.last_step()), gpu, bfloat16=half != "float16" and half != "fp16")


@contextlib.contextmanager
def _recording(session: FakeSession) -> Iterator[None]:
    session.start()
    try:
        with contextlib.suppress(AllocatorOutOfMemory):  # told of in the snapshot
            yield
    finally:
        session.stop()


# By a part of torch's own words.
_ADVICE = {
    # its product of grouped experts, which autocast does not reach
    "inputs of BF16 type": " Mixtures of experts need --dtype bfloat16.",
    # transformers' own, of caches that a sliding window cuts
    "models with only full attention layers": " Drop --cache-implementation quantized: a real run fails as well.",
    # PEFT's adapter of grouped experts
    "does not work with lora_dropout": " Drop --lora-dropout, or name other modules (--lora-target-modules).",
    # PEFT's and TRL's own words for a name that no module has, and for modules that cannot be adapted
    **dict.fromkeys(
        ("not found in the base model", "Applying a PEFT adapter to `lm_head`", "incompatible with Mamba"),
        " Name other modules with --lora-target-modules.",
    ),
    # FSDP2 takes the dtype of gradients from its first forward, in which PEFT has the adapter frozen
    "grad_dtype": " A real run fails too if its first forward is that of the reference, the adapter switched off: "
    "drop --beta, or let the model generate (--generation hf).",
}


@contextlib.contextmanager
def _values_wanted(model: str) -> Iterator[None]:
    """End in one sentence where a model's code cannot go on without real values."""
    needs_values: tuple[Any, ...] = tuple(
        target.get() for target in (torch_names.NEEDS_VALUES, torch_names.NEEDS_SHAPES, torch_names.UNSUPPORTED)
    )
    try:
        yield
    except needs_values as error:
        what = f"its code needs real values (operation {getattr(error, 'func', None)})"
        raise InputError(f"{model}: cannot be simulated, {what}; run it and record it instead.") from error
    except (RuntimeError, ValueError) as error:
        what = str(error).partition("\n")[0][:160]
        advice = next((words for part, words in _ADVICE.items() if part in what), "")
        raise InputError(f"{model}: cannot be simulated with these settings ({what}).{advice}") from error
    except (AttributeError, TypeError, KeyError, IndexError, ArithmeticError) as error:
        package = _failing_package(error)
        if package is None:  # a mistake of ours
            raise
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"
        raise InputError(f"{model}: cannot be simulated, {package} cannot use this model ({what}).") from error


def _failing_package(error: BaseException) -> str | None:
    """Return which of the executed libraries raised an error, below torch and the fake world; None if we did."""
    found, trace = None, error.__traceback__
    while trace is not None:
        package, _, rest = str(trace.tb_frame.f_globals.get("__name__")).partition(".")
        passed_on = package == "memprof" and rest.startswith(("simulate.fake_cuda", "simulate.recorder"))
        if package != "torch" and not passed_on:
            found = package
        trace = trace.tb_next
    return found if found in ("trl", "transformers", "peft", "accelerate") else None


def simulate_settings(
    settings: Settings,
    *,
    capacity: int | None = None,
    gpu: Gpu | None = None,
    stacks: bool = True,
    by_name: bool = False,
    growth: bool = True,
    shortcuts: bool = True,
) -> SnapshotFile:
    """Run TRL's training step on fake (shape-only) tensors and return a raw snapshot.

    Args:
        settings: the run.
        capacity: bytes the device has for this process.
        gpu: whose workspaces and context are assumed.
        stacks: keep Python stacks.
        by_name: the trainer is given the model's name and loads it onto one GPU; else a model that was moved there.
        growth: repeat every step of generation, whose growing cache decides what is reserved, and run every
            micro-batch; else the first ones and the last, which are enough for what is held.
        shortcuts: leave out work that repeats; else execute everything. Where a shortcut fails, everything is executed
            and a note says so.

    Raises:
        InputError: the model cannot be found, or its code needs real values.
        UsageError: options that cannot be satisfied, or the installed TRL, transformers ... are not those this was
            written for.
    """
    features = features_of(settings)
    for feature in features:
        require(feature)
    import peft  # noqa: F401  (loaded, as the next, before the fake world opens: they make constants)
    import transformers.masking_utils  # noqa: F401
    import trl  # noqa: F401

    run = partial(_simulated, settings, features, capacity, gpu, stacks=stacks, by_name=by_name, growth=growth)
    if shortcuts:
        return _certain(run)
    with without(*SHORTCUTS):
        return run()


def _certain(run: Callable[[], SnapshotFile]) -> SnapshotFile:
    """Simulate with shortcuts; where that ends in an error, and without them it does not, answer without them."""
    try:
        return run()
    except UsageError:
        raise
    except Exception as error:
        if isinstance(error, MemprofError) and error.__cause__ is None:  # a refusal of ours, not a library's error
            raise
        what = type(error.__cause__ or error).__name__
    with without(*SHORTCUTS):
        raw = run()
    raw["memprof"]["notes"].append(f"simulated without shortcuts, since one of them failed ({what}); please report it.")
    return raw


def _simulated(
    settings: Settings,
    features: list[str],
    capacity: int | None,
    gpu: Gpu | None,
    *,
    stacks: bool,
    by_name: bool,
    growth: bool,
) -> SnapshotFile:
    from memprof.simulate.sharding.dtensors import fake_group
    from memprof.simulate.trainer.models import load_config
    from memprof.simulate.trainer.training import run_trl, selected_of

    config = load_config(settings.model)

    def execute(
        shape: Any, room: int | None, train: Callable[[FakeSession, Callable[[FakeSession], None]], None]
    ) -> SnapshotFile:
        """Simulate the run of a model of this shape; ``train`` is given what trains it."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_values_wanted(settings.model))
            dimension = {"fsdp2": "dp_shard", "tp": "tp"}.get(settings.sharding) if settings.gpus > 1 else None
            mesh = stack.enter_context(fake_group(settings.gpus, dimension)) if dimension else None

            def run(session: FakeSession) -> None:
                notes = [note for feature in features for note in missing(feature)]
                session.notes += [note for note in dict.fromkeys(notes) if note not in session.notes]
                session.growth = growth
                train(session, lambda session: run_trl(settings, shape, session, mesh, by_name=by_name))

            return simulate(
                run,
                config={**settings.to_dict(), **model_facts(shape)},
                device=settings.device,
                attention=None if settings.attn == "auto" else settings.attn,
                padding=settings.padding == "worst",
                selected=selected_of(settings),
                alloc_conf=settings.alloc_conf,
                capacity=room,
                gpu=gpu,
                world_size=settings.gpus,
                stacks=stacks,
            )

    if (depth := shortcut("depth")) is not None:
        raw: SnapshotFile | None = depth.simulated_by_depth(
            settings, config, execute, capacity, growth=growth, by_name=by_name, key=(gpu, stacks)
        )
        if raw is not None:
            return raw
    return execute(config, capacity, lambda session, train: train(session))


def features_of(settings: Settings) -> list[str]:
    """List what these settings enter, by the names of :data:`memprof.compat.features.FEATURES`, the general first."""
    found = ["simulate"]
    if settings.trainer == "rloo":
        found += ["simulate.rloo", *(["lean.rloo"] if settings.lean else [])]
    if settings.recipe in ("lean", "liger"):
        found.append(f"simulate.{settings.recipe}")
    if not settings.lean and settings.checkpointing in ("selective", "offloaded"):
        found.append(f"simulate.{settings.checkpointing}")
    if settings.sharding in ("fsdp2", "tp"):
        found.append(f"simulate.{settings.sharding}")
    if settings.sharded_by_zero:
        found.append("simulate.zero")
    return found


def model_facts(config: Any) -> dict[str, int | bool]:
    """Return what attribution wants to know of a model.

    Raises:
        InputError: the config does not say it.
    """
    shape = ModelShape.of(config)
    return {
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocabulary,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied,
    }
