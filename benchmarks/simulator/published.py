"""Simulate what others measured on GPUs and described in a text: tables, issues, and one program that is public.

    python -m benchmarks.simulator published [--only NAME]...

What a text leaves open (lengths, which layers an adapter has, which optimizer) is set here as its trainer's defaults
are; ``known`` says whether anything was. Nothing is fitted. The table of methods is simulated by
``examples/published_tables.py``. Rows are kept in ``benchmarks/results/cpu/published_rows.json`` as they are done.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import click

from benchmarks.tabling import RESULTS
from memprof.config.settings import Settings
from memprof.units import GIB

FILE = RESULTS / "published_rows.json"
_GB = 10**9
_LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@dataclass(frozen=True)
class Published:
    """Hold one published measurement: ``what`` was measured (allocated, reserved, device), on which GPU, where it
    stands; ``known``: *exactly*, or *by a text*, which leaves settings open.
    """

    name: str
    source: str
    card: str
    what: str
    measured_bytes: int
    known: str
    settings: dict[str, Any]


_LOSS_LOOP = "github.com/mdy666/mdy_triton at 0718fab, triton_kernels/grpo: test_memory.py"
_SOUP = "github.com/MakazhanAlpamys/Soup at 2428453, benchmarks/gate-h100-validation.md"
_TUNE = "torchtune's README: compiled, one GPU"
_PROBE = (
    "github.com/jsboige/CoursIA, MyIA.AI.Notebooks/GenAI/PostTraining/_measurements: vram_wall_probe.py and its results"
)
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _qlora(
    model: str, card: str, group: int, completion: int, known: str = "exactly", **gib: float
) -> tuple[Published, ...]:
    """List what was measured of one run of TRL's GRPO with QLoRA: prompts of 12 tokens, TRL before 1.14."""
    settings = {
        "model": model, "dtype": "bfloat16", "load_in_4bit": True, "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16", "lora_r": 8, "lora_target_modules": _MODULES, "lora_dropout": 0.05,
        "recipe": "trl-full-logits", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "beta": 0.0,
        "gradient_checkpointing": "full", "prompt_length": 12, "padding": "worst", "num_generations": group,
        "completion_length": completion,
    }  # fmt: skip
    name = f"GRPO, QLoRA, {model.rpartition('/')[2]}, groups of {group}, {completion} tokens"
    return tuple(
        Published(f"{name}, {what}", _PROBE, card, what, int(value * GIB), known, settings)
        for what, value in gib.items()
    )


#: Programs that are public, and so known to the last operation.
ROWS: tuple[Published, ...] = (
    *_qlora("Qwen/Qwen3-14B", "RTX 4090", 8, 288, allocated=15.730, reserved=17.508),
    *_qlora("Qwen/Qwen3-8B", "16GB", 8, 96, allocated=7.850, reserved=8.600),
    *_qlora("Qwen/Qwen3-8B", "16GB", 16, 160, allocated=9.155, reserved=10.189),
    Published("GRPO loss loop, 1 × 2048 tokens", _LOSS_LOOP, "H200", "reserved", int(15.26 * GIB), "exactly",
              {"sequences": 1, "completion_length": 2048}),
    Published("GRPO loss loop, 8 × 4096 tokens", _LOSS_LOOP, "H200", "reserved", int(128.95 * GIB), "exactly",
              {"sequences": 8, "completion_length": 4096}),
)  # fmt: skip
_SFT = {"trainer": "sft", "dtype": "bfloat16"}
_ADAPTED = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: Runs of a trainer, known by what a text says.
TEXTS: tuple[Published, ...] = (
    # It allocates a float32 tensor of logits less than every recipe of this trainer: its release is not known.
    *_qlora("Qwen/Qwen3-1.7B", "8GB", 8, 96, "by a text", allocated=2.744, reserved=3.102),
    Published("SFT, 8B, LoRA, 4 × 1024 tokens", _SOUP, "H100", "device", int(70.99 * GIB), "by a text",
              {**_SFT, "model": _LLAMA, "lora_r": 16, "max_length": 1024, "per_device_train_batch_size": 4,
               "gradient_checkpointing": False}),
    Published("SFT, 8B, LoRA, torchtune", _TUNE, "RTX 4090", "allocated", int(16.2 * _GB), "by a text",
              {**_SFT, "model": _LLAMA, "lora_r": 8, "lora_target_modules": _ADAPTED, "max_length": 2048,
               "per_device_train_batch_size": 2}),
    Published("GRPO, 3B, LoRA, ms-swift", "github.com/modelscope/ms-swift/issues/3848", "A100-80GB", "device", 12 * _GB,
              "by a text",
              {"model": "Qwen/Qwen2.5-3B-Instruct", "dtype": "bfloat16", "lora_r": 64, "prompt_length": 3072,
               "completion_length": 1024, "per_device_train_batch_size": 1, "num_generations": 2,
               "gradient_accumulation_steps": 6, "beta": 0.04, "generation": "none"}),
)  # fmt: skip


def simulated(row: Published) -> int:
    """Simulate a row, and return the bytes that were published of it."""
    from memprof.config.gpus import find_gpu
    from memprof.simulate.run import simulate, simulate_settings

    gpu = find_gpu(row.card)
    if "model" not in row.settings:
        raw = simulate(lambda session: _loss_loop(session, **row.settings), gpu=gpu, stacks=False, torch_release="2.6")
    else:
        raw = simulate_settings(Settings(**row.settings), gpu=gpu, stacks=False)
    highest = raw["memprof"]["highest"]
    if row.what == "allocated":
        return int(highest["allocated_bytes"])
    return int(highest["reserved_bytes"]) + (gpu.context_bytes if row.what == "device" else 0)


def _loss_loop(session: Any, sequences: int, completion_length: int) -> None:
    """Run forward, loss and backward of DeepSeek-R1-Distill-Qwen-1.5B in bf16, three times, gradients kept."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from memprof.simulate.fake_cuda.fakes import materialize

    config = Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        vocab_size=151_936, tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    device = torch.device("cpu")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    materialize(model, device)
    model.eval()
    session.add_model(model, "policy")
    tokens = torch.zeros(sequences, completion_length + 100, dtype=torch.int64)
    targets = tokens[:, -completion_length:].contiguous()
    mask = torch.ones_like(targets, dtype=torch.int32)
    # The reference's and the old log-probabilities, which the kernel reads.
    kept = [torch.zeros(sequences, completion_length) for _ in range(2)]
    for _ in range(3):
        total = mask.sum()
        # As transformers did when this was measured, April 2025: heads are repeated for attention, not grouped by it.
        with patch("transformers.integrations.sdpa_attention.use_gqa_in_sdpa", lambda *_: False):
            logits = model(tokens, logits_to_keep=completion_length + 1).logits
        loss = (_in_place_loss().apply(logits, targets) * mask).sum() / total
        loss.backward()
        del logits
    del kept


def _in_place_loss() -> Any:
    """Return a loss of log-probabilities whose gradient is written over the logits, as the program's kernel does."""
    import torch

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any, targets: Any) -> Any:
            loss, sums, divergence, clipped = (
                torch.empty(targets.shape, dtype=torch.float32, device=logits.device) for _ in range(4)
            )
            ctx.save_for_backward(logits, targets, sums)
            del divergence, clipped
            return loss

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            return ctx.saved_tensors[0].data, None

    return InPlace


def read() -> dict[str, Any]:
    """Read what was simulated, by name."""
    found: dict[str, Any] = json.loads(FILE.read_text())["rows"] if FILE.is_file() else {}
    return found


@click.command(help=__doc__)
@click.option("--only", multiple=True, help="A row's name; may be given more than once.")
def main(only: tuple[str, ...]) -> None:
    for row in (*ROWS, *TEXTS):
        if only and row.name not in only:
            continue
        rows = {**read(), row.name: {"simulated_bytes": simulated(row)}}
        ordered = {known.name: rows[known.name] for known in (*ROWS, *TEXTS) if known.name in rows}
        FILE.write_text(json.dumps({"rows": ordered}, indent=1) + "\n")
        print(row.name, f"{100 * (rows[row.name]['simulated_bytes'] / row.measured_bytes - 1):+.2f}%", flush=True)
