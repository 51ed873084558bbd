"""Simulate public LoRA and QLoRA training steps that were measured on GPUs, and keep how far off each prediction was.

    python -m benchmarks.simulator programs ROWS.json

``ROWS.json`` lists measurements: each ``id``, ``source``, ``pub`` (MiB allocated, reserved) and ``prog``, the settings
of the program (a hand-written loop: model, dtype, NF4, attention, batch, length, rank, checkpointing). Paths of models
are beside it. Rows whose source leaves the attention kernel open ran on Windows, whose build of torch has no flash
kernel: grouped heads are computed in full there, as the reserved memory of each of their stages confirms. They are
marked so, and count as runs known by a text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import click

from benchmarks.tabling import RESULTS

FILE = RESULTS / "programs.json"
_MIB = 2**20
_TORCH = "2.10"  # what its images had in those months, as reserved memory confirms (tinyllama, eager: 7,662 MiB)
_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def simulated(prog: dict[str, Any], folder: Path, attention: str | None) -> dict[str, int]:
    """Return the bytes that a program's second step allocates and reserves at its highest.

    ``attention``: as of :func:`memprof.simulate.run.simulate`.
    """
    import transformers.integrations.sdpa_attention as sdpa

    from memprof.config.gpus import find_gpu
    from memprof.simulate.evaluate import analyse
    from memprof.simulate.run import simulate

    grouped = (lambda *_, **__: False) if prog["shim"] else sdpa.use_gqa_in_sdpa
    with mock.patch.object(sdpa, "use_gqa_in_sdpa", grouped):
        raw = simulate(
            lambda session: _train(session, prog, folder), gpu=find_gpu(prog["gpu"]), attention=attention, stacks=False,
            torch_release=_TORCH,
        )  # fmt: skip
    found = analyse(raw)
    assert found.device_peak is not None
    return {"allocated": int(found.timeline.active.max()), "reserved": found.device_peak.reserved_bytes}


def _train(session: Any, prog: dict[str, Any], folder: Path) -> None:
    import torch

    from memprof import phase
    from memprof.simulate.trainer.optimizers import modelled_optimizer

    model = _adapted(session, prog, folder)
    session.add_model(model, "policy")
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.data = p.data.float()
    paged = prog["opt"] != "adamw"
    modelled = modelled_optimizer("paged_adamw_8bit", model, lambda size: None) if paged else None
    kind, arguments = modelled or (torch.optim.AdamW, {})
    optimizer: Any = kind(trained, lr=1e-4, **arguments)
    ids = torch.zeros(prog["b"], prog["s"], dtype=torch.long)
    more = {"attention_mask": torch.ones_like(ids)} if paged else {}
    out = loss = None
    for _ in range(2):
        if not paged:
            optimizer.zero_grad(set_to_none=True)
        with phase("forward"):
            out = model(input_ids=ids, labels=ids, **more)
        loss = out.loss
        with phase("backward"):
            loss.backward()
        with phase("optimizer_step"):
            optimizer.step()
        if paged:  # the program's variables live on into its next forward
            optimizer.zero_grad(set_to_none=True)
        else:
            del out, loss


def _adapted(session: Any, prog: dict[str, Any], folder: Path) -> Any:
    """Load the model as the program does, prepare it for 4 bits, and give it its adapter."""
    import torch
    from peft import LoraConfig, get_peft_model

    from memprof.simulate.fake_cuda.nf4 import Linear4bit, Nf4, tell_of_adapters
    from memprof.simulate.trainer.loading import load_model
    from memprof.simulate.trainer.models import build_model, load_config

    name = str(folder / prog["model"]) if prog["model"].endswith(".json") else prog["model"]
    config, dtype = load_config(name), prog["dtype"]
    config.use_cache = False
    nf4 = Nf4(getattr(torch, dtype), prog["double"]) if prog["quant"] else None
    if nf4 is not None and prog["attn"] == "sdpa":
        model = load_model(config, dtype, session, nf4)
    else:
        model = build_model(config, dtype, attention=prog["attn"], nf4=nf4)
    for p in model.parameters():
        p.requires_grad = False
    if nf4 is not None:  # peft's prepare_model_for_kbit_training
        packed = {id(module.weight) for module in model.modules() if isinstance(module, Linear4bit)}
        for p in model.parameters():
            if id(p) not in packed and p.dtype in (torch.float16, torch.bfloat16):
                p.data = p.data.to(torch.float32)
    if prog["ckpt"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    adapter = LoraConfig(
        r=prog["r"], lora_alpha=2 * prog["r"], lora_dropout=0.0, bias="none", task_type="CAUSAL_LM",
        target_modules=_TARGETS,
    )  # fmt: skip
    model = get_peft_model(model, adapter)
    if nf4 is not None:
        tell_of_adapters(model)
    return model


def read() -> dict[str, Any]:
    """Read what is kept, by id."""
    found: dict[str, Any] = json.loads(FILE.read_text())["rows"] if FILE.is_file() else {}
    return found


def table(rows: dict[str, Any]) -> str:
    """Write a row for each program: how far off allocated and reserved memory are."""
    lines = ["| program | GPU | allocated | reserved | |", "|---|---|--:|--:|---|"]
    for row in rows.values():
        errors = (100 * (row[what][1] / row[what][0] - 1) for what in ("allocated", "reserved"))
        cells = [f"{error:+.1f}%".replace("-", "−") for error in errors]
        lines.append(f"| {row['name']} | {row['gpu']} | {' | '.join(cells)} | {'in full' if row['open'] else ''} |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.argument("rows", type=click.Path(path_type=Path, exists=True))
@click.option("--only", multiple=True, help="A row's id; may be given more than once.")
def main(rows: Path, only: tuple[str, ...]) -> None:
    kept = read()
    for row in json.loads(rows.read_text()):
        if "prog" not in row or (only and row["id"] not in only):
            continue
        prog, is_open = row["prog"], "kernel" in row["left_open"]
        found = simulated(prog, rows.parent, "math" if is_open else None)
        name = f"{Path(prog['model']).stem}, {'NF4, ' * prog['quant']}{prog['attn']}, {prog['b']} × {prog['s']}"
        kept[row["id"]] = {
            "name": name, "gpu": row["gpu"], "source": row["source"], "open": is_open,
            **{what: [round(row["pub"][i] * _MIB), found[what]] for i, what in enumerate(("allocated", "reserved"))},
        }  # fmt: skip
        FILE.write_text(json.dumps({"rows": kept}, indent=1) + "\n")
        print(table({"": kept[row["id"]]}).splitlines()[-1], flush=True)
