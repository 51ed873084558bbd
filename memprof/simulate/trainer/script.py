"""An existing training script, run up to its ``trainer.train()``, which is simulated instead.

The script's own trainer object is built and trained for two steps on fake tensors: its class, its loss, its arguments,
its adapter. Nothing is trained, and nothing after ``train()`` is run. Where that object cannot be executed, its
arguments are simulated with TRL's own trainer, and a note says so.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from memprof.allocator.model import OutOfMemory
from memprof.compat.seams import Seams
from memprof.config.from_trainer import as_built, from_arguments, not_kept, prompt_tokens
from memprof.config.gpus import Gpu
from memprof.config.settings import Settings
from memprof.errors import InputError, MemprofError
from memprof.recording.run_facts import collect_setup, plain_config
from memprof.recording.trainer_phases import TrainerPhases
from memprof.simulate.recorder.session import FakeSession
from memprof.simulate.run import model_facts, simulate, simulate_settings
from memprof.simulate.trainer.build import (
    MEASURED,
    WARM_UP,
    _dataset,
    _set_optimizer,
    _steps_callback,
    selected_of,
)
from memprof.simulate.trainer.kv_caches import modelled_quanto
from memprof.simulate.trainer.lean import lean_on_cuda, reference_of
from memprof.simulate.trainer.patches import own_accelerate_state, quiet, trl_on_fakes
from memprof.simulate.trainer.rollout import fake_rollout
from memprof.simulate.trainer.script_world import script_world
from memprof.simulate.world.fakes import as_fakes, patched
from memprof.vocabulary import Phase

__all__ = [
    "is_lean",
    "lean_arguments",
    "lean_world",
    "simulate_script",
]

def is_lean(trainer: Any) -> bool:
    """Whether a trainer is the lean one, or a subclass of it."""
    from memprof.grpo import LeanGRPOTrainer

    return isinstance(trainer, LeanGRPOTrainer)


@contextmanager
def lean_world(load: Callable[..., Any], session: FakeSession, device: str) -> Iterator[None]:
    """What the lean trainer asks of the machine, answered by the simulated one.

    ``load`` reads the reference's checkpoint; its arguments are ``create_model_from_path``'s.
    """
    cuda = device == "cuda"
    with (
        patched(*reference_of(load, session if cuda else None)),
        patched(*(lean_on_cuda(session) if cuda else ())),
    ):
        yield


def lean_arguments(given: Any, folder: str, notes: list[str]) -> Any:
    """The ``LeanGRPOConfig`` that the trainer would make of ``given``, without a search of its own."""
    from memprof.grpo import LeanGRPOConfig

    arguments = LeanGRPOConfig.of(given, folder)
    if arguments.memory_budget is not None:
        notes.append(
            f"memory_budget={arguments.memory_budget!r}: no settings were searched for; those that the script leaves "
            "open are at their defaults, so a real run may choose leaner ones (memprof simulate --recipe lean "
            "--memory-budget chooses as it does)"
        )
        arguments.memory_budget = None
    defaults = {f.name: f.default for f in fields(LeanGRPOConfig) if f.default is not MISSING}
    others = not_kept(vars(arguments), defaults)
    if others:
        notes.append(f"not among the settings kept, which have the trainer's defaults: {', '.join(others)}")
    return arguments


class _Trained(BaseException):
    """The script's ``train()`` was simulated; no ``except Exception`` of the script's may go on from here."""


def simulate_script(
    script: Path,
    arguments: Sequence[str],
    changes: Mapping[str, Any],
    *,
    device: str = "cuda",
    capacity: int | None = None,
    gpu: Gpu | None = None,
    stacks: bool = True,
) -> dict[str, Any]:
    """Run a script until it trains, and simulate that; the result is a raw snapshot.

    Args:
        script: the file.
        arguments: its command line.
        changes: settings that replace the script's own (:data:`memprof.config.from_trainer.CHANGEABLE`).
        device, capacity, gpu, stacks: as :func:`memprof.simulate.run.simulate`.

    Raises:
        InputError: the script fails before it trains, or does not train, or cannot be simulated.
    """
    import transformers.masking_utils  # noqa: F401  (makes constants: loaded before the fake world opens)
    import trl  # noqa: F401

    from memprof.grpo import LeanGRPOTrainer  # noqa: F401  (there before trainers' classes are looked for)

    if not script.is_file():
        raise InputError(f"{script}: no such script.")
    found = _Interception(script, arguments, changes, device)
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
    except _NotExecutable as failed:
        if failed.settings is None:
            raise InputError(f"{script.name}: {failed.reason}") from failed
        raw = simulate_settings(failed.settings, capacity=capacity, gpu=gpu, stacks=stacks)
        whose = "memprof's lean trainer" if failed.settings.recipe == "lean" else "TRL's"
        how = f"the script's own trainer could not be executed ({failed.reason}); {whose} was, with its arguments"
    else:
        how = f"the script's own {found.trainer} was built and trained for two steps on fake tensors"
    return _told(raw, found, how)


def _told(raw: dict[str, Any], found: _Interception, how: str) -> dict[str, Any]:
    from memprof.config.expected_error import expected_error

    extra = raw["memprof"]
    if found.settings is not None:
        extra["config"] = {**(extra["config"] or {}), **found.settings.to_dict()}
        extra["expected_error"] = expected_error(extra["config"])
    extra["config"] = {**(extra["config"] or {}), "script": found.script.name, "trainer": found.trainer}
    extra["notes"] = [*(extra.get("notes") or []), f"{how}; nothing after train() was run", *dict.fromkeys(found.notes)]
    return raw


class _NotExecutable(Exception):
    """The script's trainer cannot run on fakes; ``settings`` say what it was, where that is known."""

    def __init__(self, reason: str, settings: Settings | None) -> None:
        super().__init__(reason)
        self.reason, self.settings = reason, settings


class _Interception:
    """One run of one script: what it built, and what there is to say of it."""

    def __init__(self, script: Path, arguments: Sequence[str], changes: Mapping[str, Any], device: str) -> None:
        self.script, self._arguments, self._changes, self._device = script, list(arguments), changes, device
        self.notes: list[str] = []
        self.settings: Settings | None = None
        self.trainer = "trainer"
        self._inside = 0
        self._modes: list[Any] = []
        self._data: Any = None
        self._policy: Any = None
        self._folder = ""
        self._worlds: contextlib.ExitStack | None = None
        self._lean = False

    def selected(self, shape: tuple[int, ...]) -> int:
        """See :func:`memprof.simulate.trainer.build.selected_of`; what is not GRPO selects everything."""
        if self.settings is None:
            return int(torch.Size(shape).numel())
        answer: int = selected_of(self.settings)(shape)
        return answer

    def run(self, session: FakeSession) -> None:
        """Call it inside the fake world with tracking on."""
        self._session = session
        self._modes = list(_get_current_dispatch_mode_stack())
        basis = Settings(model="script", device=self._device, padding=self._changes.get("padding", "none"))
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="memprof-simulate-"))
            stack.enter_context(own_accelerate_state())
            stack.enter_context(quiet())
            stack.enter_context(trl_on_fakes(basis, None))
            stack.enter_context(modelled_quanto())
            if self._device == "cuda":
                from memprof.simulate.trainer.patches import offloading_to_host

                stack.enter_context(offloading_to_host(session))
            stack.enter_context(script_world(self.notes.append, self._changes))
            stack.enter_context(self._trainers())
            stack.enter_context(_disable_current_modes())
            self._worlds = stack.enter_context(contextlib.ExitStack())
            self._run_script()

    def _run_script(self) -> None:
        saved, place = sys.argv, sys.path[0]
        sys.argv, sys.path[0] = [str(self.script), *self._arguments], str(self.script.resolve().parent)
        try:
            runpy.run_path(str(self.script), run_name="__main__")
        except _Trained:
            return
        except (MemprofError, _NotExecutable, OutOfMemory):
            raise
        except SystemExit as end:
            raise InputError(f"{self.script.name}: it ended ({end.code}) before it trained; {_HELP}") from None
        except Exception as error:
            raise _NotExecutable(self._reason(error), self.settings) from error
        finally:
            sys.argv, sys.path[0] = saved, place
        raise InputError(f"{self.script.name}: it ended without calling trainer.train(); {_HELP}")

    def _reason(self, error: Exception) -> str:
        """What failed, and at which line of the script."""
        line, trace = 0, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == str(self.script):
                line = trace.tb_lineno
            trace = trace.tb_next
        words = str(error).strip().partition("\n")[0][:160] or "no message"
        return f"line {line}: {type(error).__name__}: {words}"

    # -- the trainer -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _trainers(self) -> Iterator[None]:
        import trl.trainer.grpo_trainer as grpo
        from transformers import Trainer

        changes: list[tuple[Any, str, Any]] = [
            (kind, "__init__", self._building(vars(kind)["__init__"]))
            for kind in _with_subclasses(Trainer)
            if "__init__" in vars(kind)
        ]
        changes += [
            (Trainer, "train", self._training(Trainer.train)),
            (Trainer, "save_model", _nothing),
            (Trainer, "push_to_hub", _nothing),
            (grpo, "create_model_from_path", self._reference),
        ]
        with patched(*changes):
            yield

    @contextlib.contextmanager
    def _fake(self) -> Iterator[None]:
        """The fake world again, from within the script's own."""
        with contextlib.ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode)
            self._inside += 1
            try:
                yield
            finally:
                self._inside -= 1

    def _building(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = _named_arguments(original)

        @functools.wraps(original)
        def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
            if self._inside:
                original(trainer, *args, **kwargs)
                return
            call = signature.bind_partial(trainer, *args, **kwargs)
            self.trainer = type(trainer).__name__
            load = self._session.enter_phase(Phase.LOAD.value)
            with self._fake():
                self._before(trainer, call.arguments, signature)
                original(*call.args, **call.kwargs)
                self._after(trainer)
            if load is not None:
                self._session.exit_phase(load)

        return init

    def _before(self, trainer: Any, given: dict[str, Any], signature: inspect.Signature) -> None:
        from trl import GRPOTrainer

        grpo = isinstance(trainer, GRPOTrainer)
        model = given.get("model")
        if isinstance(model, nn.Module):
            as_fakes(model)
            self._policy = model
            self._session.add_model(model, "policy")
        if given.get("args") is None and grpo:
            from trl import GRPOConfig

            given["args"] = GRPOConfig(self._folder)
        if lean := is_lean(trainer):
            given["args"] = self._leanly(given["args"])
        assumed: list[str] = []
        if grpo:
            changes = {**self._changes, "device": self._device}
            name = str(getattr(getattr(model, "config", None), "_name_or_path", ""))
            self.settings = from_arguments(
                given["args"], model, given.get("peft_config"), changes, assumed, lean=lean, name=name
            )
            if self.settings.optim != "none":
                given["args"].optim = self.settings.optim
        if given.get("args") is not None:
            _tame(given["args"], self._folder, grpo=grpo)
        for name in ("callbacks", "eval_dataset"):
            if given.get(name) and name == "callbacks":
                self.notes.append(f"{len(given[name])} callback(s) of the script were left out")
            if name in signature.parameters:
                given[name] = None
        self._data = given.get("train_dataset")
        if grpo:
            rewards = given.get("reward_funcs")
            given["reward_funcs"] = self._rewards(rewards if isinstance(rewards, list) else [rewards])
            assert self.settings is not None
            self.notes += assumed
            given["train_dataset"] = _dataset(self.settings)

    def _leanly(self, given: Any) -> Any:
        """The lean trainer's arguments; from here on it is told that it is on the simulated device."""
        if not self._lean and self._worlds is not None:
            self._lean = True
            self._worlds.enter_context(lean_world(self._reference, self._session, self._device))
        return lean_arguments(given, self._folder, self.notes)

    def _rewards(self, rewards: list[Any]) -> list[Any]:
        """Reward models run; functions are replaced, since there is no text for them to look at."""
        functions = [r for r in rewards if not isinstance(r, (str, nn.Module))]
        for reward in rewards:
            if isinstance(reward, nn.Module):
                as_fakes(reward)
                self._session.add_model(reward, "reward")
        if functions:
            self.notes.append(f"{len(functions)} reward function(s) were not called: there is no text to judge")
        return [_reward_named(r) if r in functions else r for r in rewards]

    def _reference(self, name: str, architecture: Any = None, **kwargs: Any) -> Any:
        """``create_model_from_path``: the policy or the reference, by name."""
        from transformers import AutoModelForCausalLM

        config = getattr(self._policy, "config", None)
        if config is not None and name in ("", None, getattr(config, "_name_or_path", None)):
            kwargs["config"] = config
        kwargs.setdefault("dtype", "float32")  # as TRL does
        kwargs.pop("device_map", None)
        with _disable_current_modes():
            model = (architecture or AutoModelForCausalLM).from_pretrained(name, **kwargs)
        as_fakes(model)
        self._policy = self._policy if self._policy is not None else model
        return model

    def _after(self, trainer: Any) -> None:
        session = self._session
        for reward in getattr(trainer, "reward_funcs", ()):
            if isinstance(reward, nn.Module):
                as_fakes(reward)
                session.add_model(reward, "reward")
        session.owners._models.clear()
        session.add_model(trainer.model, "policy")
        if getattr(trainer, "ref_model", None) is not None and not session.host_bytes:  # else it is not on the device
            session.add_model(trainer.ref_model, "reference")
        session.owners.claim_models()
        session.setup = {"model_config": plain_config(getattr(trainer.model, "config", None))}
        if self.settings is not None:
            if "prompt_length" not in self._changes:
                self._measure_prompts(trainer)
            self.settings = as_built(self.settings, collect_setup(trainer))
            with contextlib.suppress(InputError):  # a model of another kind
                session.config.update(model_facts(trainer.model.config))
            session.config.update(self.settings.to_dict())
            fake_rollout(trainer, self.settings, session)
            _set_optimizer(trainer, self.settings, session)

    def _measure_prompts(self, trainer: Any) -> None:
        with _disable_current_modes():
            longest = prompt_tokens(self._data, trainer.processing_class)
        assert self.settings is not None
        if longest is None:
            words = f"how long its prompts are is not known; {self.settings.prompt_length} tokens were taken"
            self.notes.append(f"{words} (--prompt-length)")
            return
        self.settings = self.settings.with_(prompt_length=longest)
        self.notes.append(f"its longest prompt has {longest} tokens, and all were taken to be as long")

    def _training(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def train(trainer: Any, *_: Any, **__: Any) -> Any:
            from transformers import PrinterCallback, ProgressCallback

            with self._fake():
                seams = Seams(self._session.fail, lambda error: None)
                try:
                    phases = TrainerPhases(trainer, seams)
                    phases.current = self._session
                    for printing in (PrinterCallback, ProgressCallback):
                        trainer.remove_callback(printing)
                    trainer.add_callback(_steps_callback(self._session, phases))
                    original(trainer)
                    self._session.look_again()
                finally:
                    seams.restore()
            raise _Trained

        return train


_HELP = "give its own arguments after --, as in --script train.py -- --config grpo.yaml"


def _named_arguments(init: Callable[..., None]) -> inspect.Signature:
    """A trainer's arguments by name; the lean trainer passes on what TRL's is given."""
    from trl import GRPOTrainer

    from memprof.grpo import LeanGRPOTrainer

    return inspect.signature(GRPOTrainer.__init__ if init is LeanGRPOTrainer.__init__ else init)


def _tame(arguments: Any, folder: str, *, grpo: bool) -> None:
    """Set two steps (or generation cycles), no logging, saving or evaluation, and ``folder`` for what is written."""
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy

    cycle = 1
    if grpo:
        steps = arguments.steps_per_generation // arguments.gradient_accumulation_steps
        cycle = max(1, steps) * arguments.num_iterations
        arguments.use_vllm = arguments.log_completions = False
    arguments.output_dir = arguments.logging_dir = folder
    arguments.max_steps = (WARM_UP + MEASURED) * cycle
    arguments.logging_strategy = arguments.eval_strategy = IntervalStrategy.NO
    arguments.save_strategy = SaveStrategy.NO
    for name in ("load_best_model_at_end", "push_to_hub", "do_eval", "save_only_model", "logging_first_step"):
        setattr(arguments, name, False)
    arguments.report_to = []
    arguments.disable_tqdm = True
    arguments.dataloader_pin_memory = False
    arguments.dataloader_num_workers = 0


def _nothing(*_: Any, **__: Any) -> None:
    """What would have written something."""


def _with_subclasses(kind: Any) -> list[Any]:
    return [kind, *(sub for child in kind.__subclasses__() for sub in _with_subclasses(child))]


def _reward_named(original: Any) -> Callable[..., list[float]]:
    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    reward.__name__ = getattr(original, "__name__", "reward")
    return reward
