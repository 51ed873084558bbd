"""What stands around a message decides with it: labelled figures, tables of processes, limits, process names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memprof.oom.explain import explain_log
from memprof.report.oom import ExplainedFailure
from memprof.units import GIB
from tests.oom.wordings import EXAMPLES, WORDINGS

SHARED = sorted(Path(__file__).parents[3].glob("shared/oom*/*.txt"))
CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.14 GiB "
    "of which 1.00 GiB is free. Process 4321 has 60.00 GiB memory in use. Including non-PyTorch memory, this "
    "process has 18.00 GiB memory in use. Of the allocated memory 17.00 GiB is allocated by PyTorch, and 200.00 MiB "
    "is reserved by PyTorch but unallocated.\n"
)
OLD = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.69 GiB total capacity; "
    "3.10 GiB already allocated; 1.00 GiB free; 3.20 GiB reserved in total by PyTorch)\n"
)
SMI = """+---------------------------------------------------------------------------------------+
| Processes:                                                                            |
|  GPU   GI   CI        PID   Type   Process name                            GPU Memory |
|=======================================================================================|
|    0   N/A  N/A      2211      G   /usr/lib/xorg/Xorg                            45MiB |
|    0   N/A  N/A      9876      C   python3                                    18764MiB |
+---------------------------------------------------------------------------------------+
"""


def only(text: str) -> ExplainedFailure:
    (failure,) = explain_log(text).failures
    return failure


@pytest.mark.parametrize(
    ("name", "is_engine"), [("VllmWorkerProcess", True), ("EngineCore_0", True), ("RewardServer", False)]
)
def test_a_process_that_the_log_names_is_not_left_over(name: str, is_engine: bool) -> None:
    failure = only(f"({name} pid=4321) INFO Loading model weights\n[rank0]: {CUDA}")
    assert f"The log names process 4321 as {name}, so it belongs to this run" in failure.because
    assert not any("end processes" in row.action for row in failure.suggestions)
    assert failure.suggestions[0].action.startswith("lower the inference engine's share") == is_engine
    assert any("end processes" in row.action for row in only(CUDA).suggestions)


def test_nvidia_smis_table_names_the_largest_process() -> None:
    failure = only(OLD + SMI)
    assert "python3 (process 9876) with 18.32 GiB" in failure.because
    assert "python3 (process 9876)" in failure.suggestions[0].action
    assert failure.facts["smi_size"] == 18764 * 2**20


def test_rocm_smis_table_names_the_largest_process() -> None:
    failure = only(
        "HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 63.98 GiB of which 1.20 GiB is "
        "free. Of the allocated memory 3.10 GiB is allocated by PyTorch, and 152.50 MiB is reserved by PyTorch but "
        "unallocated.\n"
        "PID     PROCESS NAME    GPU(s)  VRAM USED       SDMA USED       CU OCCUPANCY\n"
        "77      Xorg            1       22277025        0               UNKNOWN\n"
        "4242    python3         1       62277025792     0               UNKNOWN\n"
    )
    assert "python3 (process 4242) with 58.00 GiB" in failure.because


def test_the_kernels_table_comes_first_where_it_names_another_process() -> None:
    failure = only(
        "[  pid  ]   uid  tgid total_vm      rss pgtables_bytes swapents oom_score_adj name\n"
        "[   8001]  1000  8001 30000000 14000000    449536        0             0 pt_main_thread\n"
        "[   8100]  1000  8100  3000000  1000000    449536        0             0 python3\n"
        "Out of memory: Killed process 8100 (python3) total-vm:12000000kB, anon-rss:3900000kB, file-rss:0kB\n"
    )
    assert failure.suggestions[0].action.startswith("look at pt_main_thread first")


def test_shards_that_were_loading_tell_the_phase() -> None:
    shards = "Loading checkpoint shards:  75%|███████▌  | 3/4 [00:21<00:07,  7.10s/it]\n"
    text = (
        "CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has a total capacity of 14.74 GiB of which 100.12 MiB "
        "is free. Of the allocated memory 14.51 GiB is allocated by PyTorch, and 12.33 MiB is reserved by PyTorch but "
        "unallocated."
    )
    failure = only(shards + text)
    assert "the whole model would need about 19.35 GiB" in failure.because
    assert failure.suggestions[0].action.startswith("load in")
    loaded = only(f"{shards}Loading checkpoint shards: 100%|██████████| 4/4\n{text}")
    assert "while weights were loaded or moved" not in loaded.because


def test_private_pools_that_fill_the_device_are_not_fragmentation() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 340.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 120.00 "
        "MiB is free. Including non-PyTorch memory, this process has 139.60 GiB memory in use. Of the allocated memory "
        "137.00 GiB is allocated by PyTorch, with 78.00 GiB allocated in private pools (e.g., CUDA Graphs), and 1.20 "
        "GiB is reserved by PyTorch but unallocated."
    )
    failure = only(text)
    assert (failure.cause, failure.reason) == ("full", "private_pools")
    assert "78.00 GiB of 139.80 GiB are in private pools" in failure.because
    small = text.replace("with 78.00 GiB", "with 1.00 GiB")
    assert only(small).reason != "private_pools"


def test_a_refused_block_on_hip_gets_no_split_size() -> None:
    failure = only(
        "HIP out of memory. Tried to allocate 124.00 MiB. GPU 0 has a total capacity of 19.94 GiB of which 554.47 "
        "MiB is free. Of the allocated memory 15.87 GiB is allocated by PyTorch, and 165.29 MiB is reserved by "
        "PyTorch but unallocated."
    )
    assert failure.cause == "refused"
    assert "of which 3.37 GiB are unaccounted memory" in failure.suggestions[0].why
    assert not any("max_split_size" in row.action for row in failure.suggestions)


CGROUP = "memory.max: 17179869184\nmemory.current: 17170000000\nmemory.events: low 0 high 0 max 912 oom 3 oom_kill {}\n"
XLA = "Stats: \nLimit:                 16909336576\nInUse:                 15909336576\nMaxInUse:   16009336576\n"


@pytest.mark.parametrize(
    ("text", "form", "because", "facts"),
    [
        (
            CGROUP.format(1),
            "cgroup.events",
            r"limit of host memory \(16.00 GiB\).*used 15.99 GiB",
            {"memory_max": 2**34},
        ),
        (
            "#SBATCH --mem=64G\nslurmstepd: error: Detected 1 oom_kill event in StepId=1.0.\n",
            "slurm.oom_kill",
            r"its requested host memory \(64.00 GiB\)",
            {"job_limit": 64 * GIB},
        ),
        (
            f"{XLA}RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes.",
            "jax",
            r"uses 14.82 GiB of its pool of 15.75 GiB",
            {"pool_limit": 16909336576, "pool_used": 15909336576, "pool_peak": 16009336576},
        ),
        (
            "HIP error: out of memory\nGPU[0] : VRAM Total Memory (B): 17163091968\n"
            "GPU[0] : VRAM Total Used Memory (B): 17100000000\n",
            "hip.driver",
            r"15.93 GiB of the GPU's 15.98 GiB are in use",
            {"vram_total": 17163091968, "vram_used": 17100000000},
        ),
        (
            "Out of GPU memory trying to allocate 8.016 MiB\n"
            "Effective GPU memory usage: 91.54% (14.446 GiB/15.782 GiB)\n"
            "CUDA allocator usage: 13.984 GiB (capped at 14.000 GiB)\n",
            "julia.cuda",
            r"uses 13.98 GiB of its limit of 14.00 GiB; 14.45 GiB of the GPU's 15.78 GiB",
            {"pool_limit": 14 * GIB},
        ),
        (
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 26843545600 bytes. Error code 12\n"
            "              total        used        free      shared  buff/cache   available\n"
            "Mem:            31Gi        21Gi       1.2Gi       0.3Gi        8.8Gi       9.1Gi\n",
            "torch.cpu",
            r"9.10 GiB of 31.00 GiB were available",
            {"host_total": 31 * GIB},
        ),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=77.batch.\n"
            "JobID MaxRSS ReqMem State\n77.batch 128849018K 120G OUT_OF_ME+\n",
            "slurm.oom_kill",
            r"its requested host memory \(120.00 GiB\).*used at most 122.88 GiB",
            {"job_limit": 120 * GIB},
        ),
        (
            '"State": {"OOMKilled": true, "ExitCode": 137},\n"HostConfig": {"Memory": 8589934592}\n',
            "kubernetes.oomkilled",
            r"limit of host memory \(8.00 GiB\)",
            {"container_limit": 8 * GIB},
        ),
        (
            f"{XLA}ResourceExhaustedError: OOM when allocating tensor with shape[256,224,224,64] and type float",
            "tensorflow",
            r"It uses 14.82 GiB of its limit of 15.75 GiB",
            {"pool_limit": 16909336576},
        ),
    ],
    ids=["cgroup", "slurm", "xla", "rocm", "julia", "free", "sacct", "docker", "tensorflow"],
)
def test_limits_and_usage_around_a_message_are_read(text: str, form: str, because: str, facts: dict[str, int]) -> None:
    failure = only(text)
    assert failure.form == form
    assert re.search(because, failure.because, re.S), failure.because
    assert facts.items() <= failure.facts.items()


def test_a_cgroup_that_killed_nothing_is_no_failure() -> None:
    assert not explain_log(CGROUP.format(0)).failures


@pytest.mark.parametrize(
    "text",
    [
        "run.sh: riga 12: Ucciso",
        "bash: riga 12: 88213 Ucciso                 python train.py",
        "run.sh：第 12 行：88213 已杀死               python train.py",
        "run.sh: satır 7: 4711 Öldürüldü              python train.py",
        "[1]    7 Killed                  python -m vllm",
        "run.sh: line 12:     7 Killed                  python train.py",
    ],
)
def test_killed_behind_a_line_number_in_any_language(text: str) -> None:
    assert only(f"epoch 1\n{text}\n").form.startswith("shell.killed")


def test_a_message_glued_to_the_one_before_is_read() -> None:
    first = CUDA.replace("Process 4321 has 60.00 GiB memory in use. ", "").strip().removesuffix(".")
    second = first.removeprefix("torch.OutOfMemoryError: ").replace("2.00 GiB", "3.00 GiB").replace("GPU 0", "GPU 1")
    found = explain_log(f"{first} environment-variables{second}").failures
    assert [(row.device, row.requested_bytes) for row in found] == [(0, 2 * GIB), (1, 3 * GIB)]


def test_a_figure_that_is_not_used_keeps_its_label() -> None:
    failure = only(f"Peak mem 34.108 GB, model weights take 7.51GiB\n{CUDA}swap: 12 GiB of memory were left\n")
    labels = {figure.label: figure.bytes for figure in failure.unread}
    assert labels["Peak mem"] == round(34.108 * GIB)
    assert labels["model weights take"] == round(7.51 * GIB)
    assert labels["swap"] == 12 * GIB


def test_no_answer_to_a_julia_program_speaks_of_pytorch() -> None:
    failure = only(EXAMPLES["julia.cuda"].text)
    said = " ".join([failure.because, *(f"{row.action} {row.why}" for row in failure.suggestions)])
    assert not re.search(r"(?i)torch", said)


# What an answer must not propose (in any of its remedies), and the fact of the text that contradicts it.
CONTRADICTED = [
    (r"expandable_segments:True", r"expandable_segments\W{0,4}[Tt]rue(?! to avoid)"),
    (r"nvidia-smi(?! or rocm)", r"^(?!.*\bCUDA\b).*(?:HIP|XPU|NPU|MPS(?: backend)?) out of memory"),
    (r"gradient_checkpointing ?=", r"gradient_checkpointing\W{1,4}[Tt]rue"),
    (r"fewer communicators", r"nranks 1\b|WORLD_SIZE=1\b"),
    (r"^enforce_eager=True", r"enforce_eager\W{1,3}True"),
    (r"left over|end processes", r"EngineCore|colocate_all_models|VllmWorker"),
    (r"--grad-checkpoint", r"mlx_lm.lora[^\n]{0,400}--grad-checkpoint"),
]


@pytest.mark.parametrize(("proposed", "fact"), CONTRADICTED)
def test_no_remedy_contradicts_a_fact(proposed: str, fact: str) -> None:
    texts = {**{name: example.text for name, example in EXAMPLES.items()}, **{k: w.text for k, w in WORDINGS.items()}}
    texts |= {f"{path.parent.name}/{path.name}": path.read_text(errors="replace") for path in SHARED}
    wrong = [
        (name, row.action)
        for name, text in texts.items()
        if re.search(fact, text, re.S)
        for failure in explain_log(text).failures
        if failure.kind != "host"
        for row in failure.suggestions
        if re.search(proposed, row.action)
    ]
    assert not wrong


WORKER = "RuntimeError: DataLoader worker (pid 629) is killed by signal: Killed.\n"


@pytest.mark.parametrize(
    ("who", "form", "because"),
    [
        (
            "Memory cgroup out of memory: Killed process 629 (onmt_train) total-vm:14119556kB, anon-rss:6538204kB",
            "kernel.cgroup",
            "used 6.24 GiB",
        ),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=77.0.", "slurm.oom_kill", "Slurm's cgroup"),
        ("srun: error: gpu001: task 0: Out Of Memory", "slurm.task", "Slurm's cgroup"),
        ("      Reason:       OOMKilled\n      Exit Code:    137", "kubernetes.oomkilled", "exceeded its limit"),
    ],
)
def test_who_killed_a_process_replaces_what_only_shows_that_it_ended(who: str, form: str, because: str) -> None:
    launcher = "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 0 (pid: 77)\n"
    for text in (f"{WORKER}{who}\n", f"{who}\n{WORKER}", f"{launcher}{WORKER}{who}\n"):
        failure = only(text)
        assert failure.form == form
        assert because in failure.because
        assert "fewer dataloader workers" in failure.suggestions[0].action
    assert {row.form for row in explain_log(launcher + WORKER).failures} == {"torchrun.exitcode", "dataloader.killed"}


def test_the_whole_nodes_memory_is_not_proposed_where_it_was_requested() -> None:
    text = "#SBATCH --mem=0\nsrun: error: gpu001: task 0: Out Of Memory"
    assert not any("sbatch --mem" in row.action for row in only(text).suggestions)
    assert any("sbatch --mem" in row.action for row in only(text.replace("=0", "=64G")).suggestions)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (
            "Out of memory: Killed process 8100 (python3)\n"
            "USER         PID %CPU %MEM    VSZ   RSS TTY      STAT START   TIME COMMAND\n"
            "root        8001 99.1 71.3 91234500 65011712 ?   Rl   09:50   4:46 python train.py --config a.yaml\n"
            "root           1  0.0  0.0   4360  3108 ?        Ss   Nov27   0:00 /sbin/init\n",
            {"largest_row": 65011712 * 1024},
        ),
        (
            "ray.memory_monitor.RayOutOfMemoryError: More than 95% of the memory on node Local is used (15.98 / 16.82 "
            "GB). The top 5 memory consumers are:\n\nPID\tMEM\tCOMMAND\n4758\t7.3GB\tray_Trainer:train()\n"
            "5113\t450MB\tray_Evaluator\n",
            {"used": round(15.98 * 2**30), "users": round(7.3 * 2**30)},
        ),
        (
            "[107061.603624] Tasks state (memory values in pages):\n"
            "[107061.603638] [  pid  ]   uid  tgid total_vm      rss pgtables_bytes swapents oom_score_adj name\n"
            "[107061.603685] [    379]     0   379    12038      852    94208        0          -250 systemd-journal\n"
            "[107061.603565] 242688 pages RAM\n",
            {"largest_row": 852 * 4096, "host_size": 242688 * 4096},
        ),
        (
            "RuntimeError: NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity; 10.24 GiB "
            "already allocated; 19.52 MiB free; 10.65 GiB reserved in total by PyTorch)\n"
            "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |\n"
            "+===========================+===============+====================================================+\n"
            "| 0       0                 | 3456          | python                   | 30210                   |\n",
            {"smi_size": 30210 * 2**20},
        ),
        (
            "Iter 40: Train loss 1.7, Trained Tokens 17157, Peak mem 32.138 GB\n"
            "Iter 50: Train loss 1.4, Trained Tokens 26805, Peak mem 34.108 GB\n"
            "[METAL] Command buffer execution failed: Insufficient Memory",
            {"mlx_peak": 34_108_000_000},
        ),
    ],
)
def test_tables_and_peaks_around_a_message_are_read(text: str, facts: dict[str, int]) -> None:
    failure = only(text)
    assert {key: failure.facts.get(key) for key in facts} == facts
    assert not [row for row in failure.unread if row.text == "34.108 GB"]


def test_a_desktops_programs_are_not_left_over_from_a_run() -> None:
    table = "\n".join(line for line in SMI.split("\n") if "python3" not in line)
    failure = only(OLD.replace("18.9", "1.9") + table)
    assert not any("left over" in row.action for row in failure.suggestions)
    assert any("left over" in row.action for row in only(OLD + SMI).suggestions)


@pytest.mark.parametrize(
    "setup",
    [
        '  File "/root/LLaMA-Factory/src/train.py", line 9, in run_rm\n    trainer = PairwiseTrainer(\n'
        '  File "/venv/transformers/trainer.py", line 500, in __init__\n    self._move_model(model, device)\n',
        '  File "/venv/torch/utils/_device.py", line 106, in __torch_function__\n    return func(*args, **kwargs)\n',
    ],
)
def test_no_batch_size_helps_before_the_first_step(setup: str) -> None:
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 136.00 MiB. GPU 0 has a total capacity of 23.65 "
        "GiB of which 93.81 MiB is free. Including non-PyTorch memory, this process has 23.50 GiB memory in use. Of "
        "the allocated memory 21.51 GiB is allocated by PyTorch, and 2.30 MiB is reserved by PyTorch but unallocated."
    )
    failure = only(f"Traceback (most recent call last):\n{setup}{text}")
    assert "before training or serving began" in failure.because
    assert not any("batch" in row.action for row in failure.suggestions)


def test_a_trainer_that_generates_nothing_gets_no_completions_to_shorten() -> None:
    text = "==((====))==  Unsloth - 2x faster\nBatch size per device = 1\nOutOfMemoryError: CUDA out of memory\n"
    actions = " ".join(row.action for row in only(text).suggestions)
    assert "max_seq_length" in actions
    assert "completion" not in actions
    assert "per_device_train_batch_size" not in actions.split("logits")[0]
    assert "max_completion_length" in " ".join(row.action for row in only("GRPOTrainer " + text).suggestions)


@pytest.mark.parametrize(("text", "size"), [("float", 4), ("half", 2), ("int64", 8), ("complex128", 16)])
def test_a_shape_and_a_type_are_a_size(text: str, size: int) -> None:
    failure = only(f"ResourceExhaustedError: OOM when allocating tensor with shape[320,512] and type {text} on /job:x")
    assert failure.requested_bytes == 320 * 512 * size


def test_a_gpu_allocator_behind_bad_alloc_is_no_host_memory() -> None:
    pool = "/src/rmm/mr/device/pool_memory_resource.hpp:179: Maximum pool size exceeded"
    failure = only(f"MemoryError: std::bad_alloc: RMM failure at:{pool}")
    assert (failure.form, failure.kind) == ("rmm", "driver")
    assert "maximum_pool_size" in failure.suggestions[0].action
    assert only("MemoryError: std::bad_alloc").kind == "host"


def test_a_frame_with_a_relative_path_shows_the_framework() -> None:
    frame = '  File "slime/utils/ppo_utils.py", line 219, in vocab_parallel_softmax\n    x = logits - logits_max\n'
    assert only(f"{CUDA}\n{frame}").framework == "slime"


@pytest.mark.parametrize("line", ["    h = F.scaled_dot_product_attention(", "`h = F.scaled_dot_product_attention("])
def test_the_line_of_code_above_a_message_without_a_traceback_is_read(line: str) -> None:
    npu = (
        "RuntimeError: NPU out of memory. Tried to allocate 35.31 GiB (NPU 0; 60.97 GiB total capacity; 26.13 GiB "
        "already allocated; 33.81 GiB free; 26.61 GiB reserved in total by PyTorch)"
    )
    assert "attention scores" in only(f"{line}\n{npu}`").because
    assert "attention scores" not in only(f"max_length = 4096\n{npu}").because
