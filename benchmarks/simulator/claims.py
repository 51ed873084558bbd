"""Check claims about the memory of GRPO by simulations and timings, for benchmarks/measurements.md.

    python -m benchmarks.simulator claims [--only NAME]... [--json benchmarks/results/cpu/claims.json]

Every simulation is TRL's own step on tensors without values. Runs that are already in the JSON file are not executed
again (``--fresh`` does), so that a long session can be interrupted. The whole takes some ten minutes of one core and
2 GB.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import environment
from memprof.config.settings import Settings
from memprof.units import GIB

SIZES = {
    "0.5B": "Qwen/Qwen2.5-0.5B-Instruct",
    "1.5B": "Qwen/Qwen2.5-1.5B-Instruct",
    "7B": "Qwen/Qwen2.5-7B-Instruct",
    "14B": "Qwen/Qwen2.5-14B-Instruct",
}
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


class Book:
    """Simulations by their settings, kept as they are made."""

    def __init__(self, path: Path | None, fresh: bool) -> None:
        self._path = path
        known = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() and not fresh else {}
        self.runs: dict[str, dict[str, Any]] = known.get("runs", {})
        self.claims: dict[str, Any] = known.get("claims", {})

    def row(self, settings: Settings) -> dict[str, Any]:
        """Return peaks in bytes: ``peak``, ``needed`` (reserved and outside torch), ``own`` and ``categories``."""
        plain = settings.to_dict()
        key = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
        if key not in self.runs:
            print(f"simulating {settings.model} ...", file=sys.stderr, flush=True)
            self.runs[key] = _simulated(settings)
            self.save()
        return self.runs[key]

    def save(self) -> None:
        """Write what is known."""
        if self._path is not None:
            data = {"claims": self.claims, "runs": self.runs, "environment": environment()}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _simulated(settings: Settings) -> dict[str, Any]:
    from memprof.config.gpus import CONTEXT_BYTES
    from memprof.simulate.evaluate import evaluate

    analysis = evaluate(settings, None).analysis
    peak, device = analysis.peak, analysis.device_peak
    assert device is not None
    return {
        "settings": {k: v for k, v in settings.to_dict().items() if v != getattr(Settings("x"), k)},
        "peak": peak.allocated_bytes,
        "phase": peak.phase,
        "needed": device.reserved_bytes + CONTEXT_BYTES,
        "categories": {name: size for name, size in peak.categories.items() if size},
        "own": {name: size for name, size in analysis.own_peaks.items() if size},
        "groups_own": analysis.group_own_peaks,
    }


def parameters(model: str) -> int:
    """Count a model's parameters; tied ones once."""
    import torch
    from transformers import AutoModelForCausalLM

    from memprof.simulate.trainer.models import load_config

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(load_config(model)).parameters())


# -- the claims ------------------------------------------------------------------------------------------------------


def adapter(model: str, **changes: Any) -> Settings:
    """Return settings of rank 16 under checkpointing, one completion of 256 + 768 tokens at a time, two to a prompt."""
    lean = {"num_generations": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    base = Settings(model, dtype="bfloat16", lora_r=16, prompt_length=256, completion_length=768, **lean)
    return base.with_(**changes)


def qlora_is_gb_per_billion(book: Book) -> dict[str, Any]:
    """QLoRA needs as many GB as the model has billions of parameters; LoRA four times that."""
    rows = {}
    for size in ("1.5B", "7B"):
        model = SIZES[size]
        qlora, lora = book.row(adapter(model, load_in_4bit=True)), book.row(adapter(model))
        rows[size] = {
            "parameters": parameters(model),
            "qlora_gb": qlora["needed"] / 1e9,
            "lora_gb": lora["needed"] / 1e9,
            "qlora_gb_per_billion": qlora["needed"] / parameters(model),
            "lora_to_qlora": lora["needed"] / qlora["needed"],
        }
    return rows


def sharing_a_base(book: Book) -> dict[str, Any]:
    """Policy and reference on one base with an adapter save about half."""
    model = SIZES["1.5B"]
    two = Settings(
        model, dtype="bfloat16", optim="adamw_8bit", beta=0.04, prompt_length=256, completion_length=768
    )  # fmt: skip
    one = two.with_(lora_r=16, optim="adamw_torch_fused")
    rows = {"two policies": book.row(two), "two policies, no reference": book.row(two.with_(beta=0.0)),
            "one base, LoRA": book.row(one)}  # fmt: skip
    return {
        name: {
            "needed_gib": row["needed"] / GIB,
            "models_gib": (row["own"]["weights"] + row["own"].get("reference_model", 0)) / GIB,
            "trained_gib": sum(row["own"].get(c, 0) for c in ("gradients", "optimizer_state")) / GIB,
        }
        for name, row in rows.items()
    }


def eight_bit_adam(book: Book) -> dict[str, Any]:
    """8-bit Adam takes 4 bytes a parameter where Adam takes 8."""
    model = SIZES["0.5B"]
    count = parameters(model)
    found = {}
    for dtype in ("float32", "bfloat16"):
        for optim in ("adamw_torch_fused", "adamw_8bit"):
            row = book.row(Settings(model, dtype=dtype, optim=optim, prompt_length=256, completion_length=256))
            found[f"{optim}, {dtype} weights"] = row["own"]["optimizer_state"] / count
    return found


def accumulation(book: Book) -> dict[str, Any]:
    """Gradient accumulation stores gradients further back, so it costs more memory the more steps there are."""
    base = Settings(SIZES["0.5B"], dtype="bfloat16", num_generations=4, per_device_train_batch_size=4,
                    prompt_length=256, completion_length=768)  # fmt: skip
    rows = {}
    for steps in (1, 2, 4):
        # One generation for each micro-batch, so that only the accumulation changes.
        row = book.row(base.with_(gradient_accumulation_steps=steps, steps_per_generation=1))
        rows[str(steps)] = {
            "gradients_gib": row["own"]["gradients"] / GIB,
            "peak_gib": row["peak"] / GIB,
            "phase": row["phase"],
        }
    return rows


def one_and_a_half_billion_in_5_gb(book: Book) -> dict[str, Any]:
    """GRPO on a 1.5B model in 5 GB."""
    rows = {}
    for completion in (256, 768):
        row = book.row(adapter(SIZES["1.5B"], load_in_4bit=True, completion_length=completion))
        rows[f"256 + {completion}"] = {
            "needed_gb": row["needed"] / 1e9,
            "phase": row["phase"],
            "largest": max(row["categories"], key=row["categories"].__getitem__),
        }
    return rows


def table_of_510_gb(book: Book) -> dict[str, Any]:
    """Llama-3.1-8B at 20K tokens and 8 completions needs 510.8 GB with TRL: which of its rows come out."""
    base = Settings(LLAMA, dtype="bfloat16", lora_r=16, prompt_length=1024, completion_length=19456)
    runs = {
        "TRL today, checkpointing": base,
        "logits materialised, checkpointing": base.with_(recipe="trl-full-logits"),
        "TRL today, nothing recomputed": base.with_(gradient_checkpointing=False),
    }
    closed = {"logits, policy and reference, bf16": 2 * 2 * 8 * 20480 * 128256 / GIB,
              "keys and values of one sequence, bf16": 2 * 32 * 8 * 128 * 2 * 20480 / GIB}  # fmt: skip
    rows = {}
    for name, settings in runs.items():
        row = book.row(settings)
        groups = {group: size / GIB for group, size in row["groups_own"].items() if size}
        rows[name] = {"peak_gib": row["peak"] / GIB, "own_peaks_gib": groups}
    return {"closed_forms_gib": closed, "executed": rows}


def forty_nine_gb_for_0_6b(book: Book) -> dict[str, Any]:
    """A 0.6B model takes 49 GB (trl issue 3456: micro-batch 4, prompts of 2048, completions of 1024)."""
    then = Settings("Qwen/Qwen3-0.6B", num_generations=4, per_device_train_batch_size=4, prompt_length=2048,
                    completion_length=1024, beta=0.04, gradient_checkpointing=False,
                    recipe="trl-full-logits")  # fmt: skip
    runs = {
        "as reported": then,
        "with today's loss": then.with_(recipe="trl"),
        "and checkpointing": then.with_(recipe="trl", gradient_checkpointing=True),
        "and bf16 weights, no reference": then.with_(
            recipe="trl", gradient_checkpointing=True, dtype="bfloat16", beta=0.0
        ),
    }
    rows = {}
    for name, settings in runs.items():
        row = book.row(settings)
        parts = {c: round(size / GIB, 2) for c, size in sorted(row["categories"].items(), key=lambda kv: -kv[1])}
        rows[name] = {"needed_gib": row["needed"] / GIB, "peak_gib": row["peak"] / GIB, "phase": row["phase"],
                      "at_the_peak_gib": dict(list(parts.items())[:6])}  # fmt: skip
    return rows


def checkpointing_costs(book: Book) -> dict[str, Any]:
    """Checkpointing makes a step 20 to 30% slower: forward and backward of a small Llama, timed and counted."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=576, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=9,
                         num_key_value_heads=3, vocab_size=4096, tie_word_embeddings=True)  # fmt: skip
    model = LlamaForCausalLM(config).train()
    ids = torch.randint(4096, (2, 512))

    def step(checkpointed: bool) -> None:
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        model(ids, labels=ids).loss.backward()
        model.zero_grad()

    counted = []
    for checkpointed in (False, True):
        with FlopCounterMode(display=False) as counter:
            step(checkpointed)
        counted.append(counter.get_total_flops())
    ratios = []
    for _ in range(7):
        times = []
        for checkpointed in (False, True):
            start = time.perf_counter()
            step(checkpointed)
            times.append(time.perf_counter() - start)
        ratios.append(times[1] / times[0])
    return {"flops_ratio": counted[1] / counted[0], "time_ratio_cpu_median": statistics.median(ratios),
            "time_ratios_cpu": ratios}  # fmt: skip


def offload_costs(book: Book) -> dict[str, Any]:
    """Offloading layers' inputs to the host costs 1%: arithmetic, as no GPU was at hand to time it.

    A layer's input is moved out once and back once, 2 x 2 bytes a token and hidden unit; in the same time the layer
    computes about 8 x its parameters a token (forward, recomputation, and two products backward). What is moved can
    hide behind what is computed where the link is at least this fast.
    """
    from memprof.config.catalogue import find_config

    rows = {}
    for name, model in {**SIZES, "Llama-3.1-8B": LLAMA}.items():
        config = find_config(model)
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        per_layer = (parameters(model) - config["vocab_size"] * hidden * (2 - _tied(config))) / layers
        flops, moved = 8 * per_layer, 2 * 2 * hidden
        rows[name] = {"bytes_per_token_and_layer": moved,
                      "gb_per_s_to_hide_at_400_tflops": moved / flops * 400e12 / 1e9}  # fmt: skip
    return rows


def _tied(config: dict[str, Any]) -> int:
    return int(bool(config.get("tie_word_embeddings")))


CLAIMS: dict[str, Callable[[Book], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        eight_bit_adam,
        accumulation,
        one_and_a_half_billion_in_5_gb,
        forty_nine_gb_for_0_6b,
        sharing_a_base,
        qlora_is_gb_per_billion,
        table_of_510_gb,
        checkpointing_costs,
        offload_costs,
    )
}


@click.command(help=__doc__)
@click.option(
    "--only", multiple=True, type=click.Choice(list(CLAIMS)), metavar="CLAIM", help=f"Of {', '.join(CLAIMS)}."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path))
@click.option("--fresh", is_flag=True, help="Execute again what the file has.")
def main(only: tuple[str, ...], json_file: Path | None, fresh: bool) -> None:
    book = Book(json_file, fresh)
    for name in only or CLAIMS:
        function = CLAIMS[name]
        print(f"\n{name}: {(function.__doc__ or '').splitlines()[0]}")
        found = function(book)
        book.claims[name] = {"claim": (function.__doc__ or "").splitlines()[0], "found": found}
        book.save()
        print(json.dumps(found, indent=1))
