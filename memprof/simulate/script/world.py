"""Give a script that is simulated models without weights, and tokenizers and data where they are at hand.

The script's own lines run as they are, outside the fake mode. Whatever loads weights gives a model on ``meta``, built
from its config; hubs are not asked; where a tokenizer or a dataset is not on this machine, a stand-in takes its place
and a note says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch

from memprof.compat import optional_packages as optional_names
from memprof.compat import patching
from memprof.compat import torch as torch_names
from memprof.compat import transformers as transformers_names
from memprof.compat.patching import replacing
from memprof.config.from_trainer import ARGUMENTS
from memprof.config.trainer_fields import TRAINER_CLASSES, Unsimulated, class_fields, left_out_of, unsimulated_field
from memprof.errors import InputError
from memprof.simulate.fake_cuda.nf4 import Nf4, quantize_nf4
from memprof.simulate.trainer.models import load_config

Note = Callable[[str], None]
LeaveOut = Callable[[list[Unsimulated]], None]
# Arguments that the script's own trainer does not follow here: what launches and compiles, and what frees memory of a
# GPU. With them, what switches each of them off.
_LEFT_OUT: dict[str, Any] = {
    "auto_find_batch_size": False, "deepspeed": None, "fsdp": [], "parallelism_config": None, "torch_compile": False,
    "torch_empty_cache_steps": None, "use_liger_kernel": False, "use_transformers_continuous_batching": False,
    "use_transformers_paged": False,
}  # fmt: skip


@contextlib.contextmanager
def script_world(note: Note, changes: Mapping[str, Any], leave_out: LeaveOut) -> Iterator[None]:
    """Replace loading, moving and arguments by what a script without a GPU, weights or network needs, while open.

    ``note`` receives every stand-in and every change; ``changes`` replace the script's own settings; ``leave_out``
    receives arguments that change memory and are not simulated.
    """
    with (
        patching(
            (optional_names.HUB_OFFLINE, True),
            (optional_names.DATA_OFFLINE, True),
            *((target, _data_or_stand_in(target.get(), note)) for target in _LOADERS),
            (torch_names.MODULE_TO, _moved(torch_names.MODULE_TO.get())),
            (torch_names.MODULE_CUDA, lambda self, *_, **__: self),
            (
                transformers_names.ARGUMENTS_CHECK,
                _on_no_gpu(transformers_names.ARGUMENTS_CHECK.get(), changes, leave_out),
            ),
        ),
        replacing(*_loading(_Loading(note)), *_older_arguments(note)),
    ):
        yield


_LOADERS = (optional_names.LOAD_DATASET, optional_names.LOAD_FROM_DISK)


def _loading(reading: _Loading) -> list[tuple[Any, str, Any]]:
    """List the class methods that load something; every auto class has a copy of its own of the method."""
    import transformers

    model, name = transformers_names.MODEL_FROM_PRETRAINED.place()
    autos = [kind for kind in with_subclasses(transformers_names.AUTO_CLASS.get()) if name in vars(kind)]
    methods = [
        *((kind, reading.model) for kind in (*autos, model)),
        (transformers.AutoConfig, reading.config),
        (transformers.GenerationConfig, reading.generation_config),
        (transformers.AutoTokenizer, reading.tokenizer),
        (transformers.AutoProcessor, reading.tokenizer),
    ]
    return [(kind, name, _class_method(kind, name, method)) for kind, method in methods]


def with_subclasses(kind: Any) -> list[Any]:
    return [kind, *(sub for child in kind.__subclasses__() for sub in with_subclasses(child))]


def _class_method(kind: Any, name: str, method: Callable[..., Any]) -> Any:
    """Make ``method(original, cls, ...)`` a class method to stand in the place of ``kind``'s own or inherited one."""
    original = vars(kind).get(name)
    bound = getattr(kind, name)

    def replaced(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return method(original.__get__(None, cls) if original is not None else bound, cls, *args, **kwargs)

    return classmethod(replaced)


class _Loading:
    """Answer ``from_pretrained`` without weights."""

    def __init__(self, note: Note) -> None:
        self._note = note

    def config(self, original: Any, cls: Any, name: Any, **kwargs: Any) -> Any:
        try:
            return original(name, **{**kwargs, "local_files_only": True})
        except (OSError, ValueError, ImportError):
            config = load_config(str(name))
        return (config, {}) if kwargs.get("return_unused_kwargs") else config

    def generation_config(self, original: Any, cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(name, *args, **{**kwargs, "local_files_only": True})
        except (OSError, ValueError):
            return cls()

    def model(self, original: Any, cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config")
        if config is None:
            config = load_config(str(name))
        asked = kwargs.get("dtype", kwargs.get("torch_dtype"))
        kind = _dtype_of(asked, config)
        if asked is None:
            self._note(f"{name}: no dtype was asked for; {str(kind).removeprefix('torch.')} is taken")
        attention = kwargs.get("attn_implementation") or "sdpa"
        if attention not in ("sdpa", "eager"):
            self._note(f"{name}: {attention} is simulated as torch's attention, which uses flash if possible")
            attention = "sdpa"
        with torch.device("meta"):
            auto = transformers_names.AUTO_FROM_CONFIG.of(cls)
            make = auto or transformers_names.MODEL_FROM_CONFIG.of(cls)
            model = make(config, dtype=kind, attn_implementation=attention)
            quantization = kwargs.get("quantization_config")
            if kwargs.get("load_in_4bit") or getattr(quantization, "load_in_4bit", False):
                quantize_nf4(model, Nf4.of(kwargs if quantization is None else vars(quantization)))
            elif quantization is not None:
                raise InputError(f"{name}: only 4-bit quantization (bitsandbytes NF4) can be simulated.")
        model.tie_weights()
        setattr(model.config, transformers_names.MODEL_NAME.name, str(name))
        return model

    def tokenizer(self, original: Any, cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        why = "not on this machine"
        try:
            loaded = original(name, *args, **{**kwargs, "local_files_only": True})
            if _makes_tokens(loaded):
                return loaded
            why = "without a vocabulary on this machine"
        except (OSError, ValueError):  # as the library says when there is nothing on this machine
            pass
        except Exception as error:  # a file that it cannot read
            why = f"not readable on this machine ({type(error).__name__}: {' '.join(str(error).split())[:80]})"
        self._note(f"The tokenizer of {name} is {why}; it was replaced by one that counts four characters as a token")
        return tokenizer_of_few_words()


def _makes_tokens(tokenizer: Any) -> bool:
    """Tell whether a tokenizer knows tokens; transformers makes one without a vocabulary where a folder has none."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor's
    return not callable(tokenizer) or bool(tokenizer("some text")["input_ids"])


def _dtype_of(asked: Any, config: Any) -> torch.dtype:
    if isinstance(asked, torch.dtype):
        return asked
    if isinstance(asked, str) and asked != "auto":
        return getattr(torch, asked.removeprefix("torch."))  # type: ignore[no-any-return]
    kept = getattr(config, "dtype", None)
    if isinstance(kept, str):
        kept = getattr(torch, kept.removeprefix("torch."), None)
    return kept if isinstance(kept, torch.dtype) else torch.bfloat16  # what today's checkpoints are kept in


def tokenizer_of_few_words() -> Any:
    """Make a tokenizer that cuts text into fours of characters, all the same token, and knows a chat template."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": 1, "<eos>": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]{1,4}"), "isolated")
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    made.chat_template = "{% for m in messages %}{{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}"
    return made


def _data_or_stand_in(original: Any, note: Note) -> Callable[..., Any]:
    def load(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:  # offline, gated, unknown: all the same here
            what = args[0] if args else kwargs.get("path", "a dataset")
            note(f"dataset {what}: not on this machine ({type(error).__name__}); its rows are not known")
            return NoData()

    return load


class NoData:
    """Stand for a dataset that is not on this machine: any column, any change of it, and no row."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self

    def __getitem__(self, key: Any) -> Any:
        return self if isinstance(key, (str, slice)) else _Anything()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 1000


class _Anything(dict):  # type: ignore[type-arg]
    """Stand for a row with an empty text in every column."""

    def __missing__(self, key: Any) -> str:
        return ""


def _moved(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make a ``Module.to`` for modules without values: there is no device to move to, a dtype is taken."""

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        first = next(iter(self.parameters()), None)
        if first is None or (first.device.type != "meta" and torch_names.FAKE_DEVICE.of(first) is None):
            return original(self, *args, **kwargs)
        _, dtype, _, _ = torch_names.PARSE_TO.get()(*args, **kwargs)
        return self if dtype is None else original(self, dtype=dtype)

    return to


def _older_arguments(note: Note) -> list[tuple[Any, str, Any]]:
    """Let the configurations of trainers take arguments that only earlier releases had and that change no memory."""
    import trl

    common = class_fields()["TrainingArguments"].earlier
    kinds = {name: getattr(trl, name, None) for name in TRAINER_CLASSES.values()}
    return [
        (kind, kind.__init__.__name__, _without_earlier(kind, common | class_fields()[name].earlier, note))
        for name, kind in kinds.items()
        if kind is not None
    ]


def _without_earlier(kind: Any, earlier: frozenset[str], note: Note) -> Callable[..., None]:
    original, known = kind.__init__, {field.name for field in fields(kind)}

    def made(self: Any, *args: Any, **given: Any) -> None:
        dropped = [name for name in given if name in earlier and name not in known]
        if dropped:
            what = "argument" if len(dropped) == 1 else "arguments"
            note(f"{type(self).__name__}: left out the {what} of an earlier release: {', '.join(dropped)}")
        original(self, *args, **{name: value for name, value in given.items() if name not in dropped})

    return made


def _on_no_gpu(original: Any, changes: Mapping[str, Any], leave_out: LeaveOut) -> Callable[[Any], None]:
    """Change training arguments to what this machine can hold, before ``original`` checks them."""

    def check(self: Any) -> None:
        self.use_cpu = True
        self.tf32 = None
        for ours, theirs in ARGUMENTS.items():
            if ours in changes and hasattr(self, theirs):
                setattr(self, theirs, changes[ours])
        given = {name: getattr(self, name, None) for name in _LEFT_OUT}
        found = [unsimulated_field(name) for name in left_out_of(given)]
        leave_out([field for field in found if field is not None])
        for name, off in _LEFT_OUT.items():
            if given[name]:
                setattr(self, name, off)
        original(self)

    return check
