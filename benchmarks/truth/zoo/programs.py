"""Prepare each program of the zoo: small settings, random weights, generated data. No line of theirs is here."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import string
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

WORDS = [f"w{i}" for i in range(400)]


class _Stub(types.ModuleType):
    """A module that is not installed here and does nothing: logging, plotting, engines that are not used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")


def stub(*names: str) -> None:
    """Put empty modules in the place of packages that are missing."""
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = sys.modules.setdefault(".".join(parts[:end]), _Stub(".".join(parts[:end])))
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)


def execute(path: Path, constants: Mapping[str, Any] | None = None, swaps: Mapping[str, str] | None = None) -> Any:
    """Run a script as ``__main__`` in its folder.

    Args:
        path: the script.
        constants: top-level names (or keywords of their own line) given other values.
        swaps: texts put in the place of others: a device, a path.
    """
    source = path.read_text(encoding="utf-8")
    for name, value in (constants or {}).items():
        source, n = re.subn(
            rf"(?m)^(\s*{re.escape(name)}(?:: [\w\[\]]+)? ?= ?)[^\n=].*$",
            lambda m, v=value: m.group(1) + repr(v),
            source,
            count=1,
        )
        if not n:
            raise ValueError(f"{path.name} has no line that sets {name}")
    for old, new in (swaps or {}).items():
        if old not in source:
            raise ValueError(f"{path.name} does not contain {old!r}")
        source = source.replace(old, new)
    sys.path.insert(0, str(path.parent))
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def replace_in(path: Path, swaps: Mapping[str, str]) -> None:
    """Put other settings in a module's file."""
    text = path.read_text(encoding="utf-8")
    for old, new in swaps.items():
        if old not in text:
            raise ValueError(f"{path.name} does not contain {old!r}")
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def on_cpu(folder: Path) -> None:
    """Let the modules beside a script name the CPU where they name a GPU."""
    for path in folder.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        new = re.sub(r"""(["'])cuda(?::0)?\1""", r"\1cpu\1", text)
        if new != text:
            path.write_text(new, encoding="utf-8")


@contextlib.contextmanager
def without_a_gpu() -> Iterator[None]:
    """Make calls that need a GPU do nothing, loading do without worker processes, compiling return its model."""
    import torch.utils.data as data

    original = data.DataLoader.__init__

    def loader(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.update(num_workers=0, pin_memory=False)
        for name in ("prefetch_factor", "persistent_workers"):
            kwargs.pop(name, None)
        original(self, *args, **kwargs)

    def same(model: Any = None, *_: Any, **__: Any) -> Any:
        return model if model is not None else (lambda function: function)

    with contextlib.ExitStack() as stack:
        for target, name, new in (
            (data.DataLoader, "__init__", loader),
            (torch, "compile", same),
            (torch.Tensor, "cuda", lambda self, *a, **k: self),
            (torch.nn.Module, "cuda", lambda self, *a, **k: self),
            (torch.Tensor, "pin_memory", lambda self, *a, **k: self),
            (torch, "save", _write_nothing),
            (torch.cuda, "synchronize", lambda *a, **k: None),
            (torch.cuda, "set_device", lambda *a, **k: None),
            (torch.cuda, "is_bf16_supported", lambda *a, **k: True),
        ):
            stack.enter_context(mock.patch.object(target, name, new))
        yield


def _write_nothing(_: Any, file: Any, *args: Any, **kwargs: Any) -> None:
    """Stand in for ``torch.save``: an empty file, so that what renames it finds it."""
    if isinstance(file, (str, os.PathLike)):
        Path(file).touch()


def tokens_file(path: Path, count: int, vocabulary: int, dtype: Any = np.uint16) -> None:
    """Write random token ids."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.random.default_rng(0).integers(0, vocabulary, count).astype(dtype).tofile(path)


def text_of(words: int) -> str:
    return " ".join(WORDS[(i * 37) % len(WORDS)] for i in range(words))


def tokenizer(vocabulary: int) -> Any:
    """Return a fast tokenizer of whole words with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<bos>", "<eos>", "<unk>", *WORDS, *string.printable]
    names = list(dict.fromkeys(names))
    names += [f"x{i}" for i in range(vocabulary - len(names))]
    plain = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    return fast


@contextlib.contextmanager
def random_models(config: Any, vocabulary: int, *classes: str) -> Iterator[None]:
    """Let ``from_pretrained`` of transformers' classes make a model of ``config`` with random weights."""
    import transformers

    def make(*args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.generation_config.eos_token_id = None
        return model.to(dtype) if isinstance(dtype, torch.dtype) else model

    with contextlib.ExitStack() as stack:
        for name in classes or ("AutoModelForCausalLM",):
            stack.enter_context(mock.patch.object(getattr(transformers, name), "from_pretrained", make))
        words = tokenizer(vocabulary)
        stack.enter_context(mock.patch.object(transformers.AutoTokenizer, "from_pretrained", return_value=words))
        yield


def small_llama(vocabulary: int = 4111, **others: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        **{
            "vocab_size": vocabulary,
            "hidden_size": 288,
            "intermediate_size": 776,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
            **others,
        }
    )


def _stopping(owner: Any, name: str, calls: int) -> Any:
    """Patch a method so that the program ends at its call number ``calls``."""
    original, count = getattr(owner, name), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] > calls:
            raise SystemExit
        return original(*args, **kwargs)

    return mock.patch.object(owner, name, counted)


# -- the first half -----------------------------------------------------------------------------------------------


def nanogpt(checkout: Path, _: Any) -> None:
    for split in ("train", "val"):
        tokens_file(checkout / f"data/tiny/{split}.bin", 20_000, 5003)
    os.chdir(checkout)
    (checkout / "data/tiny/meta.pkl").write_bytes(__import__("pickle").dumps({"vocab_size": 5003}))
    execute(
        checkout / "train.py",
        {
            "dataset": "tiny",
            "batch_size": 6,
            "block_size": 72,
            "n_layer": 4,
            "n_head": 4,
            "n_embd": 256,
            "gradient_accumulation_steps": 2,
            "max_iters": 3,
            "eval_iters": 1,
            "eval_interval": 100,
            "device": "cpu",
            "dtype": "float32",
            "compile": False,
        },
    )


def mingpt(checkout: Path, _: Any) -> None:
    folder = checkout / "projects/chargpt"
    os.chdir(folder)
    letters = [chr(c) for c in range(0x4E00, 0x4E00 + 3001)]
    (folder / "input.txt").write_text("O God, O God!" + "".join(letters) * 2, encoding="utf-8")
    sys.path.insert(0, str(checkout))
    sys.argv += [
        "--model.model_type=gpt-mini",
        "--trainer.max_iters=4",
        "--trainer.batch_size=8",
        "--data.block_size=64",
        "--trainer.device=cpu",
    ]
    execute(folder / "chargpt.py", swaps={"model.generate(x, 500": "model.generate(x, 12"})


def llama2_c(checkout: Path, _: Any) -> None:
    os.chdir(checkout)
    stub("sentencepiece")
    for i in range(3):
        tokens_file(checkout / f"data/TinyStories_all_data/d{i}.bin", 20_000, 6007)
    execute(
        checkout / "train.py",
        {
            "batch_size": 6,
            "max_seq_len": 80,
            "vocab_source": "llama2",
            "vocab_size": 32000,
            "dim": 160,
            "n_layers": 4,
            "n_heads": 4,
            "n_kv_heads": 2,
            "gradient_accumulation_steps": 2,
            "max_iters": 2,
            "eval_iters": 1,
            "device": "cpu",
            "dtype": "float32",
            "compile": False,
        },
    )


def tiny_grpo(checkout: Path, _: Any) -> None:
    os.chdir(checkout)
    stub("wandb")
    on_cpu(checkout)
    (checkout / "data").mkdir(exist_ok=True)
    row = {"question": text_of(9), "answer": "3", "num_terms": 2, "num_digits": 2}
    (checkout / "data/math_tasks.jsonl").write_text((json.dumps(row) + "\n") * 4, encoding="utf-8")
    with random_models(small_llama(), 4111, "LlamaForCausalLM"):
        execute(
            checkout / "train.py",
            {"group_size": 4, "rollouts_per_step": 2, "train_batch_size": 4, "checkpoint_path": None},
            {"max_length = 1024": "max_length = 100", 'torch.device("cpu", device_index)': 'torch.device("cpu")'},
        )


def nanogrpo(checkout: Path, _: Any) -> None:
    os.chdir(checkout)
    stub("wandb")
    on_cpu(checkout)
    import datasets

    data = datasets.Dataset.from_list([{"question": text_of(12), "answer": "a #### 4"}] * 8)
    sys.path.insert(0, str(checkout))
    replace_in(checkout / "grpo.py", {"max_new_tokens = 512": "max_new_tokens = 24"})
    with (
        random_models(small_llama(tie_word_embeddings=True), 4111),
        mock.patch.object(datasets, "load_dataset", return_value={"train": data}),
    ):
        grpo = importlib.import_module("grpo")
        train = grpo.GRPO.train
        with mock.patch.object(grpo.GRPO, "train", lambda self, *a, **k: train(self, max_iterations=2)):
            execute(checkout / "train.py", {"group_size": 4})


def minimind(checkout: Path, _: Any) -> None:
    os.chdir(checkout / "trainer")
    sys.path.insert(0, str(checkout))
    words = tokenizer(4201)
    (checkout / "dataset").mkdir(exist_ok=True)
    rows = [{"conversations": [{"role": "user", "content": text_of(10)}, {"role": "assistant", "content": "w1"}]}] * 8
    (checkout / "dataset/rlaif.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    sys.argv += [
        "--device=cpu",
        "--batch_size=4",
        "--mini_batch_size=2",
        "--hidden_size=256",
        "--num_hidden_layers=4",
        "--max_gen_len=24",
        "--max_seq_len=48",
        "--save_interval=1000",
    ]
    import transformers

    class Judge(torch.nn.Module):
        """Scores by a recurrent network of another shape."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(4201, 208)
            self.recurrent = torch.nn.GRU(208, 416, 2, batch_first=True)
            self.head = torch.nn.Linear(416, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.recurrent(self.embedding(ids))[0][:, -1])  # type: ignore[no-any-return]

        def get_score(self, _: Any, messages: Any) -> float:
            return float(self(words(messages[-1]["content"] or "w1", return_tensors="pt").input_ids))

    with (
        mock.patch.object(transformers.AutoTokenizer, "from_pretrained", return_value=words),
        mock.patch.object(transformers.AutoModel, "from_pretrained", return_value=Judge()),
        mock.patch.object(torch, "load", return_value={}),
    ):
        execute(checkout / "trainer/train_ppo.py", {}, None)


def minchatgpt(checkout: Path, tracer: Any) -> None:
    os.chdir(checkout / "src")
    sys.path.insert(0, str(checkout / "src"))
    stub("torchinfo", "dataset", "sentencepiece")
    sys.modules["loralib"] = _loralib()
    on_cpu(checkout / "src")
    import torch.utils.tensorboard as board

    board.SummaryWriter = mock.MagicMock()  # type: ignore[misc]
    configs, gpt = importlib.import_module("configs"), importlib.import_module("gpt")
    small = {"n_layers": 4, "n_heads": 4, "embedding_dim": 192, "vocab_size": 50257, "block_size": 96}

    def config(name: str) -> Any:
        found = original(name)
        for key, value in small.items():
            setattr(found, key, value)
        return found

    original = configs.get_configs
    ids = torch.randint(0, 50257, (8, 96))
    rows = [(ids[i], torch.ones(96, dtype=torch.long), torch.tensor(40)) for i in range(3)]
    roles = {"GPTCritic": "value_model", "GPTRewardModel": "reward_model"}

    def load(cls: Any, cfg: Any, *_: Any) -> Any:
        model = cls(cfg)
        if cls.__name__ in roles:  # the program calls parts of these, never the whole
            tracer.mark_module(model, roles[cls.__name__])
        return model

    for kind in (gpt.GPTActor, gpt.GPTCritic, gpt.GPTRewardModel):
        kind.from_checkpoint = classmethod(load)
    trainers = importlib.import_module("trainers")
    trainers.TiktokenTokenizer = gpt.TiktokenTokenizer = mock.MagicMock(
        return_value=types.SimpleNamespace(pad_token=50256, eos_token=50256, decode=str, encode=list)
    )
    configs.get_configs = config
    sys.modules["dataset"].DahoasSFTStaticPromptsDataset = lambda **k: rows  # type: ignore[attr-defined]
    train = importlib.import_module("train_ppo")
    init = trainers.PPOTrainer.__init__

    def short(self: Any, *args: Any) -> None:
        init(self, *args)
        self.max_new_tokens, self.dtype, self.total_epochs = 8, torch.float32, 1

    with mock.patch.object(trainers.PPOTrainer, "__init__", short):
        train.train(2, "zoo", None, None)


def _loralib() -> Any:
    """Stand in for ``loralib``: a linear layer with two low-rank matrices beside its weight."""
    module = _Stub("loralib")

    class Linear(torch.nn.Linear):
        def __init__(self, wide: int, out: int, r: int = 0, bias: bool = True, **_: Any) -> None:
            super().__init__(wide, out, bias)
            self.lora_A = torch.nn.Parameter(torch.randn(r, wide) * 0.01)
            self.lora_B = torch.nn.Parameter(torch.zeros(out, r))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T

    def mark(model: torch.nn.Module, *_: Any) -> None:
        for name, p in model.named_parameters():
            p.requires_grad_("lora_" in name)

    module.Linear, module.mark_only_lora_as_trainable = Linear, mark
    return module


def llms_from_scratch(checkout: Path, _: Any) -> None:
    folder = checkout / "ch05/01_main-chapter-code"
    os.chdir(folder)
    stub("matplotlib", "matplotlib.pyplot", "matplotlib.ticker", "tiktoken")
    (folder / "the-verdict.txt").write_text(text_of(4500), encoding="utf-8")
    plots: Any = sys.modules["matplotlib.pyplot"]
    plots.subplots = lambda **k: (mock.MagicMock(), mock.MagicMock())
    fake = mock.MagicMock()
    fake.encode = lambda text, **k: [hash(w) % 5021 for w in text.split()]
    fake.decode = lambda ids: ""
    sys.modules["tiktoken"].get_encoding = lambda name: fake  # type: ignore[attr-defined]
    lines = {
        '"vocab_size": 50257': '"vocab_size": 5021',
        '"context_length": 256': '"context_length": 96',
        '"emb_dim": 768': '"emb_dim": 240',
        '"n_heads": 12': '"n_heads": 6',
        '"n_layers": 12': '"n_layers": 4',
        '"num_epochs": 10': '"num_epochs": 1',
        "max_new_tokens=50": "max_new_tokens=6",
        'torch.load("model.pth", weights_only=True)': "model.state_dict()",
    }
    execute(folder / "gpt_train.py", swaps=lines)


def reasoning_from_scratch(checkout: Path, tracer: Any) -> None:
    stub("sympy", "sympy.parsing", "sympy.core.sympify", "sympy.polys.polyerrors", "matplotlib", "matplotlib.pyplot")
    for name, error in (("sympy.core.sympify", "SympifyError"), ("sympy.polys.polyerrors", "PolynomialError")):
        setattr(sys.modules[name], error, type(error, (Exception,), {}))
    sys.path.insert(0, str(checkout))
    qwen = importlib.import_module("reasoning_from_scratch.qwen3")
    third, sixth = (importlib.import_module(f"reasoning_from_scratch.ch0{i}") for i in (3, 6))
    small = {
        **qwen.QWEN_CONFIG_06_B,
        "vocab_size": 5101,
        "context_length": 160,
        "emb_dim": 288,
        "n_heads": 4,
        "n_layers": 4,
        "hidden_dim": 776,
        "head_dim": 72,
        "n_kv_groups": 2,
    }
    words = mock.MagicMock()
    words.encode, words.decode, words.eos_token_id = (lambda text, **k: list(range(5, 30))), (lambda ids: "x"), None
    third.load_model_and_tokenizer = lambda **k: (qwen.Qwen3Model(small), words)
    third.load_math500_test = list
    sixth.load_math_train = lambda *a, **k: [{"problem": "p", "answer": "4"}] * 4
    update = qwen.KVCache.update

    def cached(self: Any, layer: int, value: Any) -> None:
        update(self, layer, value)
        for tensor in value:
            tracer.mark(tensor, "kv_cache", "cache")

    qwen.KVCache.update = cached
    folder = checkout / "ch06/02_rlvr_grpo_scripts_intro"
    os.chdir(folder)
    sys.argv += ["--steps=3", "--num_rollouts=3", "--max_new_tokens=16"]
    execute(folder / "rlvr_grpo_original_no_kl.py")


def dpo(checkout: Path, _: Any) -> None:
    os.chdir(checkout)
    stub("hydra", "wandb", "tensor_parallel", "preference_datasets")
    on_cpu(checkout)
    sys.path.insert(0, str(checkout))
    rng = np.random.default_rng(0)

    def batches(**kwargs: Any) -> Iterator[dict[str, Any]]:
        for _ in range(3):
            out: dict[str, Any] = {}
            for side in ("chosen", "rejected"):
                ids = torch.tensor(rng.integers(5, 4111, (4, 70)))
                out |= {
                    f"{side}_input_ids": ids,
                    f"{side}_attention_mask": torch.ones_like(ids),
                    f"{side}_labels": ids.clone(),
                }
            yield out

    sys.modules["preference_datasets"].get_batch_iterator = batches  # type: ignore[attr-defined]
    utils = importlib.import_module("utils")
    trainers = importlib.import_module("trainers")

    def sliced(batch: Any, rank: int, world: int, device: Any) -> Any:
        return {k: v[rank::world] for k, v in batch.items()}

    trainers.slice_and_move_batch_for_device = utils.slice_and_move_batch_for_device = sliced
    trainers.all_gather_if_needed = lambda values, *a: values
    from omegaconf import OmegaConf

    config = OmegaConf.create(
        {
            "model": {
                "name_or_path": "tiny",
                "tokenizer_name_or_path": None,
                "policy_dtype": "float32",
                "reference_dtype": "float32",
                "archive": None,
            },
            "datasets": ["x"],
            "max_length": 70,
            "max_prompt_length": 20,
            "n_epochs": 1,
            "n_examples": 6,
            "batch_size": 4,
            "n_eval_examples": 4,
            "eval_batch_size": 4,
            "local_dirs": [str(checkout / "c")],
            "trainer": "BasicTrainer",
            "loss": {"name": "dpo", "beta": 0.1, "reference_free": False, "label_smoothing": 0},
            "optimizer": "RMSprop",
            "lr": 1e-5,
            "warmup_steps": 2,
            "seed": 0,
            "eval_every": 400,
            "do_first_eval": True,
            "sample_during_eval": False,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 10.0,
            "debug": True,
            "wandb": {"enabled": False},
            "minimum_log_interval_secs": 1.0,
            "fsdp_port": None,
            "local_run_dir": str(checkout / "c"),
        }
    )
    (checkout / "c").mkdir(exist_ok=True)

    def entry(**_: Any) -> Callable[..., Any]:
        return lambda function: lambda: function(config)

    sys.modules["hydra"].main = entry  # type: ignore[attr-defined]
    with random_models(small_llama(tie_word_embeddings=True), 4111):
        execute(checkout / "train.py")


def ngpt(checkout: Path, _: Any) -> None:
    os.chdir(checkout)
    rotary = _Stub("rotary_embedding_torch")
    rotary.RotaryEmbedding = _Rotary
    sys.modules["rotary_embedding_torch"] = rotary
    import gzip

    (checkout / "data").mkdir(exist_ok=True)
    with gzip.open(checkout / "data/enwik8.gz", "wb") as file:
        file.write(np.random.default_rng(0).integers(32, 120, 60_000).astype(np.uint8).tobytes())
    on_cpu(checkout)
    sys.path.insert(0, str(checkout))
    model = importlib.import_module("nGPT_pytorch.nGPT")
    for kind in vars(model).values():
        if isinstance(kind, type) and kind.__hash__ is None:
            kind.__hash__ = object.__hash__  # type: ignore[assignment]  # this torch puts modules in sets
    execute(
        checkout / "train.py",
        {
            "NUM_BATCHES": 3,
            "SEQ_LEN": 96,
            "PRIME_LENGTH": 16,
            "GENERATE_LENGTH": 20,
            "VALIDATE_EVERY": 2,
            "GENERATE_EVERY": 2,
            "GRAD_ACCUM_EVERY": 2,
            "USE_AMP": False,
        },
        {"dim = 512": "dim = 192", "depth = 8": "depth = 4", "int(95e6)": "60000", "int(90e6)": "40000"},
    )


class _Rotary(torch.nn.Module):
    """Stand in for ``rotary_embedding_torch``: turns pairs of channels by a position's angle."""

    def __init__(self, dim: int, **_: Any) -> None:
        super().__init__()
        self.register_buffer("frequencies", 10000 ** (-torch.arange(0, dim, 2) / dim))

    def rotate_queries_or_keys(self, t: torch.Tensor, **_: Any) -> torch.Tensor:
        angles = torch.arange(t.shape[-2])[:, None] * self.frequencies  # type: ignore[operator]
        angles = torch.cat((angles, angles), dim=-1)
        one, two = t.chunk(2, dim=-1)
        return t * angles.cos() + torch.cat((-two, one), dim=-1) * angles.sin()


# -- the second half, opened once the rules were done ---------------------------------------------------------------


def grpo_zero(checkout: Path, tracer: Any) -> None:
    os.chdir(checkout)
    sys.path.insert(0, str(checkout))
    import torch.utils.tensorboard.writer as board

    board.SummaryWriter = mock.MagicMock()  # type: ignore[misc]
    task, model = importlib.import_module("countdown_task"), importlib.import_module("qwen2_model")
    words = importlib.import_module("tokenizer")
    words.Tokenizer = lambda path: types.SimpleNamespace(  # type: ignore[attr-defined]
        eos_token="e", eos_token_id=None, pad_token_id=0, detokenize=lambda ids: "x"
    )
    batch = importlib.import_module("data_types").MiniBatch

    class Tasks(torch.utils.data.Dataset[Any]):
        def __init__(self, **_: Any) -> None:
            self.ids = [[7 + i, *range(20, 44)] for i in range(4)]

        def __len__(self) -> int:
            return len(self.ids)

        def __getitem__(self, index: int) -> Any:
            return self.ids[index]

        @staticmethod
        def collate_fn(ids: Any) -> Any:
            some = [["w"]] * len(ids)
            return batch(["p"] * len(ids), some, ids, [[1]] * len(ids), [1] * len(ids))

    task.CountdownTasksDataset = Tasks
    cache = model.Attention.init_kv_cache

    def cached(self: Any, *args: Any, **kwargs: Any) -> None:
        cache(self, *args, **kwargs)
        tracer.mark(self.cache_k, "kv_cache", "keys")
        tracer.mark(self.cache_v, "kv_cache", "values")

    model.Attention.init_kv_cache = cached
    small = model.Qwen2Config(
        hidden_size=256,
        intermediate_size=680,
        num_attention_heads=4,
        num_hidden_layers=4,
        num_key_value_heads=2,
        vocab_size=5119,
    )
    model.Transformer.from_pretrained = classmethod(lambda cls, path, device: cls(small, device))
    settings = {
        "model": {"pretrained_model_path": "m", "device": "cpu", "dtype": "bfloat16"},
        "data": {"path": "d", "test_size": 1},
        "training": {
            "random_seed": 1,
            "max_gen_len": 20,
            "batch_size": 8,
            "num_questions_per_batch": 2,
            "micro_batch_size": 4,
            "max_grad_norm": 1.0,
            "learning_rate": 0.001,
            "weight_decay": 0.0,
            "betas": [0.9, 0.999],
            "ckpt_dir": "ckpt",
            "log_dir": "logs",
            "eval_interval": 100,
            "skip_unfinished_episodes": False,
            "ckpt_save_interval": 100,
            "memory_efficient_adamw": False,
        },
    }
    (checkout / "config.yaml").write_text(json.dumps(settings), encoding="utf-8")
    execute(checkout / "train.py")


def thelmbook(checkout: Path, _: Any) -> None:
    os.chdir(checkout)
    import datasets

    data = [{"question": text_of(12), "answer": "a #### 4"}] * 12
    with (
        random_models(small_llama(tie_word_embeddings=True), 4111),
        mock.patch.object(datasets, "load_dataset", return_value={"train": data}),
    ):
        execute(
            checkout / "GRPO.py",
            swaps={
                "'steps_per_iteration': 500": "'steps_per_iteration': 2",
                "'batch_size': 4": "'batch_size': 2",
                "'num_generations': 16": "'num_generations': 3",
                "'max_completion_length': 500": "'max_completion_length': 24",
                "max_new_tokens=512": "max_new_tokens=8",
                'model.save_pretrained("grpo_finetuned_model")': "raise SystemExit",
            },
        )


def build_nanogpt(checkout: Path, _: Any) -> None:
    os.chdir(checkout)
    stub("tiktoken", "hellaswag")
    fake: Any = sys.modules["tiktoken"]
    fake.get_encoding = lambda name: mock.MagicMock(encode=lambda text: list(range(8)), decode=str)
    questions: Any = sys.modules["hellaswag"]
    questions.iterate_examples = lambda split: [0, 1]
    rows = torch.randint(0, 5008, (4, 30))
    questions.render_example = lambda example: (None, rows, torch.ones_like(rows), 1)
    (checkout / "edu_fineweb10B").mkdir()
    for split in ("train", "val"):
        np.save(checkout / f"edu_fineweb10B/{split}_0.npy", np.random.default_rng(0).integers(0, 5008, 12_000))
    execute(
        checkout / "train_gpt2.py",
        {"total_batch_size": 960, "B": 6, "T": 80, "max_steps": 3},
        {"GPTConfig(vocab_size=50304)": "GPTConfig(80, 5008, 4, 4, 256)", "val_loss_steps = 20": "val_loss_steps = 1"},
    )


def word_language_model(checkout: Path, _: Any) -> None:
    folder = checkout / "word_language_model"
    os.chdir(folder)
    (folder / "text").mkdir()
    lines = [" ".join(f"v{(i * 20 + j) % 3000}" for j in range(20)) for i in range(150)]
    for split in ("train", "valid", "test"):
        (folder / f"text/{split}.txt").write_text("\n".join(lines), encoding="utf-8")
    sys.argv += [
        "--data=text",
        "--epochs=1",
        "--emsize=256",
        "--nhid=256",
        "--nlayers=2",
        "--batch_size=12",
        "--bptt=60",
        "--tied",
        "--lr=0.01",
        "--use-optimizer",
    ]
    with mock.patch.object(torch, "load", side_effect=SystemExit):
        execute(folder / "main.py")


def pytorch_transformer(checkout: Path, _: Any) -> None:
    os.chdir(checkout)
    stub("torchtext.datasets", "torchmetrics")
    torch.has_mps = False  # type: ignore[attr-defined]
    import datasets
    import torch.utils.tensorboard as board

    board.SummaryWriter = mock.MagicMock()  # type: ignore[misc]

    class Pairs(list[Any]):
        pass

    texts = [" ".join(f"v{(i * 18 + j) % 2500}" for j in range(18)) for i in range(300)]
    pairs = Pairs({"translation": {"en": text, "it": text}} for text in texts)
    replace_in(
        checkout / "config.py",
        {
            '"batch_size": 8': '"batch_size": 6',
            '"num_epochs": 20': '"num_epochs": 1',
            '"seq_len": 350': '"seq_len": 64',
            '"d_model": 512': '"d_model": 256',
        },
    )
    with mock.patch.object(datasets, "load_dataset", return_value=pairs), _stopping(torch.optim.Adam, "step", 3):
        execute(checkout / "train.py")


def cs336(checkout: Path, _: Any) -> None:
    os.chdir(checkout)
    stub("hydra", "hydra.core.hydra_config", "wandb", "swanlab")
    sys.path.insert(0, str(checkout))
    for split in ("train", "val"):
        tokens_file(checkout / f"data/tiny/{split}.bin", 20_000, 5011)
    import importlib.metadata

    import tokenizers
    from omegaconf import OmegaConf

    with mock.patch.object(importlib.metadata, "version", return_value="0"):
        config = importlib.import_module("cs336_basics.config")
    logger = importlib.import_module("cs336_basics.logger")
    logger.Logger = mock.MagicMock()
    parts = {"data": "Data", "model": "Model", "optimizer": "Optimizer", "training": "Training"}
    settings = OmegaConf.create({k: OmegaConf.structured(getattr(config, f"{v}Config")()) for k, v in parts.items()})
    OmegaConf.update(settings, "data.path", str(checkout / "data/tiny"))
    for name, value in {
        "model.vocab_size": 5011,
        "model.context_length": 72,
        "model.d_model": 256,
        "model.num_heads": 4,
        "model.d_ff": 680,
        "training.batch_size": 6,
        "training.max_iters": 4,
        "training.eval_interval": 3,
        "training.eval_iters": 1,
        "training.log_interval": 2,
    }.items():
        OmegaConf.update(settings, name, value)
    hydra: Any = sys.modules["hydra"]
    hydra.main = lambda **_: lambda function: lambda: function(settings)
    place: Any = sys.modules["hydra.core.hydra_config"]
    place.HydraConfig = mock.MagicMock()
    place.HydraConfig.get().runtime.output_dir = str(checkout)
    with mock.patch.object(tokenizers.Tokenizer, "from_file", side_effect=SystemExit):
        execute(checkout / "train.py")
