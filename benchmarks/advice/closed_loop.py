"""Let runs die for want of memory, follow the first advice that is said to be enough, and see whether they live.

    python -m benchmarks.advice closed-loop --out benchmarks/results/emulated-cuda/closed_loop.json

Each run trains on the emulated device (the real allocator), under a limit that it does not survive. The advice of its
recording is applied as it is printed, and the run must make its third optimizer step under the same limit. Followed
are the estimates (``memprof report``) and what ``memprof advise`` simulates: the first change that is promised to be
enough alone, or, where none is, the first together with the one that is named beside it. A server on another GPU, where
advice names one, is stood in for by completions of full length.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks.advice.results import ONLY, OUT, known, save
from benchmarks.simulator.emulated.device import Asked
from benchmarks.tabling import ROOT

_MIB = 2**20
# What the first run has room for, of what all of it reserves.
_SHARES = (0.9, 0.8, 0.7, 0.5)

_TOKENS = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 1}
#: 23M, 75M and 140M parameters.
_SMALL = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True, **_TOKENS,
}  # fmt: skip
_MIDDLE = {**_SMALL, "vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8,
           "num_attention_heads": 12, "tie_word_embeddings": False}  # fmt: skip
_LARGE = {**_SMALL, "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 9,
          "num_attention_heads": 16, "num_key_value_heads": 8}  # fmt: skip
_LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
_BF16 = {"model_init_kwargs": {"dtype": "bfloat16"}}


def _grpo(shape: dict[str, Any], prompt: int, completion: int, batch: int, lora: bool = False, **more: Any) -> Any:
    arguments = {
        "per_device_train_batch_size": batch, "num_generations": min(max(batch, 4), 8),
        "max_completion_length": completion, "optim": "adamw_torch_fused", **more,
    }  # fmt: skip
    return {"shape": shape, "prompt": prompt, "arguments": arguments, "lora": _LORA if lora else None}


def _sft(shape: dict[str, Any], row: int, batch: int, lora: bool = False, **more: Any) -> Any:
    arguments = {"per_device_train_batch_size": batch, "optim": "adamw_torch_fused", **more}
    return {"trainer": "sft", "shape": shape, "row": row, "arguments": arguments, "lora": _LORA if lora else None}


_PLAIN = {"gradient_checkpointing": False}
#: Plain TRL, as people write it.
CASES: dict[str, dict[str, Any]] = {
    "full, AdamW": _grpo(_LARGE, 64, 64, 8),
    "full, AdamW, no checkpointing": _grpo(_MIDDLE, 128, 128, 8, **_PLAIN),
    "full, foreach AdamW, reference": _grpo(_MIDDLE, 64, 128, 8, optim="adamw_torch", beta=0.04),
    "full, bf16 weights": _grpo(_LARGE, 64, 128, 8, **_BF16, **_PLAIN),
    "full, 8-bit AdamW": _grpo(_LARGE, 64, 64, 8, optim="adamw_8bit"),
    "full, SGD, no checkpointing": _grpo(_MIDDLE, 256, 128, 8, optim="sgd", **_PLAIN),
    "full, Adafactor": _grpo(_LARGE, 64, 64, 8, optim="adafactor"),
    "full, a long rollout": _grpo(_SMALL, 512, 64, 2, num_generations=8, gradient_accumulation_steps=24),
    "full, accumulated": _grpo(_MIDDLE, 64, 128, 4, gradient_accumulation_steps=4, **_PLAIN),
    "LoRA": _grpo(_LARGE, 128, 128, 16, lora=True),
    "LoRA, no checkpointing": _grpo(_LARGE, 128, 128, 8, lora=True, **_PLAIN),
    "LoRA, bf16 weights, a long rollout": _grpo(_SMALL, 1024, 64, 1, lora=True, num_generations=8,
                                                gradient_accumulation_steps=32, **_BF16),
    "LoRA, 8-bit AdamW, reference": _grpo(_LARGE, 256, 64, 8, lora=True, optim="adamw_8bit", beta=0.04, **_PLAIN),
    "SFT, full": _sft(_LARGE, 256, 8),
    "SFT, LoRA, no checkpointing": _sft(_LARGE, 512, 8, lora=True, **_PLAIN),
}


class Runs:
    """Run cases on the emulated device, each in a process of its own that is forked from one that has imported all.

    ``most``: elements of the largest tensors with values; None: all have them, which takes a quarter of an hour where
    the processor multiplies bfloat16 slowly.
    """

    def __init__(self, card: str = "24GiB", most: int | None = None) -> None:
        self._asked = Asked("benchmarks.advice.loop_runs", card, most)

    def __call__(
        self, case: Mapping[str, Any], limit: int | None = None, settings: tuple[str, ...] = (), folder: str = ""
    ) -> dict[str, Any]:
        """Train three optimizer steps with ``settings`` of advice; ``folder`` is where the callback records."""
        return self._asked({"case": case, "limit": limit, "settings": settings, "folder": folder})


def follow(runs: Runs, row: dict[str, Any], simulate: bool) -> dict[str, Any] | None:
    """Let a case die under ``row``'s limit, and follow its advice: what the row has not; None where it lives there."""
    case, limit = CASES[row["run"]], row["limit_bytes"]
    with tempfile.TemporaryDirectory(prefix="memprof-loop-") as folder:
        if runs(case, limit, folder=folder)["error"] is None:
            return None
        (snapshot,) = Path(folder).glob("*.pickle")
        found = dict(row)
        if "estimated" not in row:
            report = _advised(snapshot, "--estimate")
            found |= {name: report["oom"][name] for name in ("phase", "step")}
            found["estimated"] = _followed(runs, case, limit, report)
        if simulate and not found["estimated"]["promised"]:
            found["simulated"] = _followed(runs, case, limit, _advised(snapshot, "--seconds", "60"))
    return found


def _advised(snapshot: Path, *options: str) -> dict[str, Any]:
    """Return the report with the advice that a person is given."""
    command = [sys.executable, "-m", "memprof", "advise", str(snapshot), *options, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _followed(runs: Runs, case: Mapping[str, Any], limit: int, report: Mapping[str, Any]) -> dict[str, Any]:
    """Apply what is promised to be enough, alone or together, and run again."""
    advice = report["advice"]
    chosen = next(([row] for row in advice if row.get("enough")), None)
    if chosen is None and advice and advice[0].get("enough_with"):
        chosen = [advice[0], next(row for row in advice if row["id"] == advice[0]["enough_with"][0])]
    said = {"action": report["headline"]["action"]}
    if chosen is None:
        return {**said, "promised": [], "lived": None}
    again = runs(case, limit, tuple(row["setting"] for row in chosen))
    kept = {name: again.get(name) for name in ("error", "steps", "reserved_bytes")}
    return {
        **said, "promised": [row["id"] for row in chosen], "settings": [row["setting"] for row in chosen],
        "lived": again["error"] is None, **kept,
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count runs, what was promised and kept, and where the runs died."""
    found: dict[str, Any] = {"runs": len(rows)}
    for kind in ("estimated", "simulated"):
        told = [row[kind] for row in rows if row.get(kind)]
        for words, size in (("alone", 1), ("together", 2)):
            promised = [each for each in told if len(each["promised"]) == size]
            found[f"{kind}_{words}"] = {"promised": len(promised), "lived": sum(each["lived"] for each in promised)}
        found[f"{kind}_promised_nothing"] = sum(not each["promised"] for each in told)
    places = sorted({(row["step"], row["phase"]) for row in rows})
    found["died"] = {
        f"step {step}, {phase}": sum((row["step"], row["phase"]) == (step, phase) for row in rows)
        for step, phase in places
    }
    return found


def _open(rows: list[dict[str, Any]], only: tuple[str, ...], simulate: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows that are still to be filled, in their order; ``lived`` marks a share that was enough."""
    kept = {(row["run"], row["share"]): row for row in rows}
    for name in CASES:
        for share in _SHARES if not only or any(word in name for word in only) else ():
            row = kept.get((name, share), {"run": name, "share": share})
            waits = simulate and "estimated" in row and not row["estimated"]["promised"] and "simulated" not in row
            if "estimated" not in row or waits:
                yield row


@click.command(help=__doc__)
@ONLY
@click.option("--estimates", is_flag=True, help="Follow the estimates only.")
@OUT
def main(only: tuple[str, ...], estimates: bool, out: Path | None) -> None:
    rows: list[dict[str, Any]] = known(out).get("rows", [])
    free = {row["run"]: row["free_run_reserved_bytes"] for row in rows}
    runs = Runs()
    for row in _open(rows, only, not estimates):
        name = row["run"]
        if name not in free:
            free[name] = runs(CASES[name])["reserved_bytes"]
        limit = int(row["share"] * free[name]) // _MIB * _MIB
        found = follow(runs, {**row, "free_run_reserved_bytes": free[name], "limit_bytes": limit}, not estimates)
        if found is None:
            continue
        rows = [*(other for other in rows if (other["run"], other["share"]) != (name, row["share"])), found]
        print(json.dumps(found), flush=True)
        if out is not None:
            save({"rows": rows, "summary": summary(rows)}, out)
    print(json.dumps(summary(rows), indent=1))
