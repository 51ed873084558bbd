"""Train on GPUs of any size, one process each, as a case says and with printed advice applied.

    python -m benchmarks.advice.loop_runs < questions

A child process on the emulated device. Each line of standard input is a question: ``case`` (of
:data:`benchmarks.advice.closed_loop.CASES`), ``limit`` (bytes for torch; none: the GPU), ``settings`` (advice to
apply, as it was printed) and ``folder`` (where the callback records; none: nothing watches). Every run is forked before
the device is touched. Each answer is a line that begins with ``ANSWER``: ``error`` (None: the third optimizer step was
made), ``steps`` made, ``allocated_bytes`` and ``reserved_bytes`` at the highest.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STEPS = 3
_ENVIRONMENT = re.compile(r"[A-Z_]+=\S+")
# Arguments of the trainer; the others are of its config.
_OF_TRAINER = {"peft_config"}
# A server on another GPU: its completions are stood in for.
_OF_SERVER = {"use_vllm", "vllm_mode"}


class Applied:
    """What printed settings ask for: ``arguments`` to set, ``environment`` to export, ``statements`` to run."""

    def __init__(self) -> None:
        self.arguments: dict[str, str] = {}
        self.environment: dict[str, str] = {}
        self.statements: list[str] = []


def applied(settings: Iterable[str]) -> Applied:
    """Take printed settings apart; a comment at the end, as ``# pip install ...``, is for people.

    Raises:
        SyntaxError: one is neither keyword arguments, nor Python, nor a variable of the environment.
    """
    found = Applied()
    for setting in settings:
        for part in setting.partition("  # ")[0].split("; "):
            if _ENVIRONMENT.fullmatch(part):
                name, _, value = part.partition("=")
                found.environment[name] = value
                continue
            if (keywords := _keywords(part)) is None:
                ast.parse(part)
                found.statements.append(part)
            else:
                found.arguments |= keywords
    return found


def _keywords(text: str) -> dict[str, str] | None:
    """Read keyword arguments; None where the text is something else."""
    try:
        call = ast.parse(f"dict({text})", mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(call, ast.Call) or call.args:
        return None
    return {word.arg: ast.unparse(word.value) for word in call.keywords if word.arg}


def main() -> None:
    _import()
    for line in sys.stdin:
        print("ANSWER " + json.dumps(_forked(json.loads(line))), flush=True)


def _import() -> None:
    """Load what every run needs, and leave the device alone: a process that has touched it cannot be forked."""
    from benchmarks.simulator.emulated.edge_run import import_without_device

    import_without_device((9, 0))
    import trl.trainer.sft_trainer  # noqa: F401

    import memprof  # noqa: F401


def _forked(question: dict[str, Any]) -> dict[str, Any]:
    """Train in a process of its own.

    Raises:
        RuntimeError: the process ended without an answer.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            with os.fdopen(writing, "w") as file:
                file.write(json.dumps(_trained(question)))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    if not text:
        return {"error": "the process ended without an answer", "crashed": True, "settings": question.get("settings")}
    found: dict[str, Any] = json.loads(text)
    return found


def _trained(question: dict[str, Any]) -> dict[str, Any]:
    asked = applied(question.get("settings") or ())
    os.environ.update(asked.environment)
    import torch

    if limit := question.get("limit"):
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((limit + 0.5) / total)

    from memprof import MemProfCallback

    with tempfile.TemporaryDirectory() as folder:
        watching = [MemProfCallback(question["folder"], report=False)] if question.get("folder") else []
        trainer = _build(question["case"], asked, Path(folder), watching)
        error = None
        try:
            with _by_server(asked, question["case"]):
                trainer.train()
        except torch.OutOfMemoryError as caught:
            error = str(caught).partition("\n")[0]
    stats = torch.cuda.memory_stats()
    return {
        "error": error,
        "steps": trainer.state.global_step,
        "reserved_bytes": stats["reserved_bytes.all.peak"],
        "allocated_bytes": stats["allocated_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
    }


def _by_server(asked: Applied, case: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Answer with completions of full length where advice lets a server on another GPU generate."""
    from benchmarks.simulator.emulated.device_run import completions_of

    if "use_vllm" not in asked.arguments:
        return contextlib.nullcontext()
    length = asked.arguments.get("max_completion_length", case["arguments"]["max_completion_length"])
    return completions_of(int(length))


def _build(case: dict[str, Any], asked: Applied, folder: Path, callbacks: list[Any]) -> Any:
    """Build the trainer of a case, its model loaded by name; what was printed replaces what the case says."""
    import peft
    import torch
    import transformers
    import trl
    from datasets import Dataset

    from benchmarks.simulator.emulated.device_run import tokenizer, write_checkpoint

    names: dict[str, Any] = {"trl": trl, "LoraConfig": peft.LoraConfig, "torch": torch}
    names |= {"BitsAndBytesConfig": transformers.BitsAndBytesConfig}
    supervised = case.get("trainer") == "sft"
    kind = "SFTTrainer" if supervised else "GRPOTrainer"
    names[kind] = getattr(trl, kind)
    later = []
    for statement in asked.statements:
        if statement.startswith(("from ", "import ")):
            exec(statement, names)
        else:
            later.append(statement)
    config = transformers.LlamaConfig(**case["shape"])
    dtype = case["arguments"].get("model_init_kwargs", {}).get("dtype", "float32")
    write_checkpoint(config, dtype, folder / "model")
    values = {**_BASE, **(_SFT if supervised else _grpo(case)), **case["arguments"]}
    of_trainer: dict[str, Any] = {"peft_config": peft.LoraConfig(**case["lora"])} if case.get("lora") else {}
    for name, text in asked.arguments.items():
        if name in _OF_SERVER:
            continue
        value = eval(text, names)
        if name in _OF_TRAINER:
            of_trainer[name] = value
        elif isinstance(value, dict):  # what was in the dictionary stays
            values[name] = {**values.get(name, {}), **value}
        else:
            values[name] = value
    arguments = {
        "SFTTrainer": trl.SFTConfig,
        "GRPOTrainer": trl.GRPOConfig,
    }[kind]
    if names[kind].__module__.startswith("memprof"):
        from memprof.grpo import LeanGRPOConfig

        arguments = LeanGRPOConfig
    length = case.get("prompt", 24)
    if supervised:
        rows = {"text": ["a" * case["row"]] * 256}
    else:
        rows = {"prompt": ["a" * length] * 256}
        of_trainer["reward_funcs"] = _reward
    trainer = names[kind](
        model=str(folder / "model"), args=arguments(output_dir=str(folder), **values),
        train_dataset=Dataset.from_dict(rows), processing_class=tokenizer(), callbacks=callbacks, **of_trainer,
    )  # fmt: skip
    if not supervised:
        trainer.generation_config.eos_token_id = trainer.model.generation_config.eos_token_id = None
    names["trainer"], names["model"] = trainer, trainer.model
    for statement in later:
        exec(statement, names)
    return trainer


_BASE = {
    "max_steps": STEPS, "learning_rate": 1e-5, "bf16": True, "seed": 7, "logging_strategy": "no",
    "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
_SFT = {"max_length": 4096}


def _grpo(case: dict[str, Any]) -> dict[str, Any]:
    length = case["arguments"]["max_completion_length"]
    return {"generation_kwargs": {"min_new_tokens": length}}


def _reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) % 97 / 97 for ids in completion_ids]


if __name__ == "__main__":
    main()
