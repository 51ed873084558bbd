"""What a message alone does not tell: the frames that asked, the process's name, a container's state, Ray's repeats."""

from __future__ import annotations

import pytest

from memprof.oom import explain_log

PYTHON = "/usr/lib/python3.10/site-packages"
WAKE = (
    f'(ActorModelRayActor pid=7)   File "{PYTHON}/vllm/device_allocator/cumem.py", line 207, in wake_up\n'
    "(ActorModelRayActor pid=7)     create_and_map(handle)\n"
    f'(ActorModelRayActor pid=7)   File "{PYTHON}/vllm/device_allocator/cumem.py", line 75, in create_and_map\n'
    "(ActorModelRayActor pid=7)     python_create_and_map(*allocation_handle)\n"
    "(ActorModelRayActor pid=7) RuntimeError: CUDA Error: out of memory\n"
)
PINNED = (
    f'  File "{PYTHON}/deepspeed/accelerator/cuda_accelerator.py", line 296, in pin_memory\n'
    "    return tensor.pin_memory()\nRuntimeError: CUDA error: out of memory\n"
)
SAVER = "[torch_memory_saver.cpp] CUresult error: 2 (out of memory)  file=csrc/utils.h func=cu_mem_create line=194"
RAY = (
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n\nMemory on the node "
    "(IP: 172.31.69.247, ID: 5bf8) where the task was running was 54.86GB / 57.60GB (0.952354), which exceeds the "
    "memory usage threshold of 0.95."
)


@pytest.mark.parametrize(
    ("text", "form", "kind", "framework"),
    [
        (WAKE, "vllm.wake", "engine", "OpenRLHF"),
        (PINNED, "pinned", "host", "DeepSpeed"),
        (PINNED.replace("in pin_memory", "in move").replace("return ", "x = "), "pinned", "host", "DeepSpeed"),
        (PINNED.replace("pin_memory", "to"), "cuda.driver", "driver", "DeepSpeed"),
    ],
)
def test_the_frames_that_asked_tell_what_the_driver_does_not(text: str, form: str, kind: str, framework: str) -> None:
    (failure,) = explain_log(text)["failures"]
    assert (failure["form"], failure["kind"], failure["framework"]) == (form, kind, framework)


def test_rays_names_of_processes_tell_whose_run_it_was() -> None:
    text = f"(SGLangHttpServer pid=25) {SAVER}\n(WorkerDict pid=20) WARNING: resume_memory_occupation timed out"
    (failure,) = explain_log(text)["failures"]
    assert failure["framework"] == "verl"
    assert "actor_rollout_ref.rollout.gpu_memory_utilization" in " ".join(row["action"] for row in failure["try"])


def test_what_ray_says_it_repeats_is_told_once() -> None:
    repeated = f"(SGLangHttpServer pid=26) {SAVER} [repeated 7x across cluster]"
    rest = " (Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 to disable log deduplication)"
    for end in ("", rest):
        assert len(explain_log(f"(SGLangHttpServer pid=25) {SAVER}\n{repeated}{end}")["failures"]) == 1


def test_rays_figures_without_the_tasks_name() -> None:
    (failure,) = explain_log(RAY)["failures"]
    assert failure["form"] == "ray.monitor"
    assert "54.86 GiB of 57.60 GiB" in failure["because"]


@pytest.mark.parametrize(
    "text",
    [
        '"State": {\n "Status": "exited",\n "OOMKilled": false,\n "Dead": false,\n "ExitCode": 137,',
        "Last State: Terminated\n  Reason: Error\n  Exit Code: 137\n  Started: Mon, 13 Nov 2023",
    ],
)
def test_a_container_that_was_not_over_its_limit_is_not_told_to_raise_it(text: str) -> None:
    (failure,) = explain_log(text)["failures"]
    assert failure["form"] == "container.137"
    assert "does not say that it went over" in failure["because"]
    assert not any("raise" in row["action"] for row in failure["try"])


@pytest.mark.parametrize("text", ["Reason: OOMKilled\n Exit Code: 0", '"OOMKilled": true, "ExitCode": 137'])
def test_a_container_that_was_over_its_limit_is(text: str) -> None:
    (failure,) = explain_log(text)["failures"]
    assert failure["form"] == "kubernetes.oomkilled"


def test_a_dead_raylet_is_not_a_segmentation_fault() -> None:
    answer = explain_log(
        "(raylet) Raylet is terminated. Termination is unexpected. Possible reasons include: (1) SIGKILL by the user "
        "or system OOM killer, (2) Invalid memory access from Raylet causing SIGSEGV or SIGBUS, (3) Other signals."
    )
    assert [failure["form"] for failure in answer["failures"]] == ["ray.raylet"]
    assert answer["notes"] == []


def test_a_mapping_that_is_refused_is_one_failure_and_not_a_full_dev_shm() -> None:
    text = "RuntimeError: unable to mmap 280 bytes from file <filename not specified>: Cannot allocate memory (12)"
    (failure,) = explain_log(text)["failures"]
    assert "vm.max_map_count" in failure["try"][0]["action"]
    assert "--shm-size" not in str(failure["try"])


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("[torch_memory_saver.cpp] CUresult error  result=2 file=csrc/torch_memory_saver.cpp func=cu_mem_create",
         "torch_memory_saver.check"),
        ("Decode out of memory happened. #retracted_reqs: 1, #new_token_ratio: 0.6 -> 0.9", "sglang.retracted"),
        ("RuntimeError: Prefill out of memory. Try to lower your batch size.\nTry to allocate 13057 tokens.\n"
         "available_size=12100, evictable_size=0", "sglang.prefill"),
        ("RuntimeError: Not enough memory to handle 16000 total tokens with 4096 prefill tokens.", "tgi.warmup"),
        ("api.py:869] failed (exitcode: -7) local_rank: 1 (pid: 123) of binary: python3", "shm.sigbus"),
        ("command terminated with non-zero exit code: Error executing in Docker Container: 137", "container.137"),
    ],
)  # fmt: skip
def test_other_wordings_of_known_failures(text: str, form: str) -> None:
    (failure,) = explain_log(text)["failures"]
    assert failure["form"] == form


@pytest.mark.parametrize(
    "text",
    [
        "failed (exitcode: -11) local_rank: 1 (pid: 123) of binary: /usr/bin/python3",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 31 of 64: Resource temporarily unavailable",
        "Error invalid argument at line 393 in file /src/bitsandbytes/csrc/pythonInterface.c",
    ],
)
def test_what_is_not_about_memory_says_so(text: str) -> None:
    answer = explain_log(text)
    assert answer["failures"] == []
    assert "not about memory" in answer["notes"][0]
