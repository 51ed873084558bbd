"""What to try where the host's memory ran out or a process was killed for it."""

from __future__ import annotations

import re
from collections.abc import Callable

from memprof.oom.failure import Failure
from memprof.oom.frameworks import Names
from memprof.units import GIB, format_bytes

__all__ = ["HOST"]

Remedy = tuple[str, str]
Answer = tuple[str, list[Remedy]]

_HOST_IS_NOT_THE_GPU = "host memory, not the device's"
# A container's state that names another reason than its memory limit.
_NOT_OOMKILLED = re.compile(r"oomkilled\"?\s*[:=]\s*\"?false|\breason\"?:\s*\"?error\b", re.I)


def _size(failure: Failure, name: str) -> str | None:
    value = failure.facts.get(name)
    return format_bytes(int(value)) if isinstance(value, (int, float)) and value else None


def _less(names: Names) -> list[Remedy]:
    """Return what makes a training run hold less on the host, whoever ended it."""
    offload = names.offload or "CPU offload of parameters or optimizer state"
    return [
        (
            f"hold less on the host: switch off or shrink {offload}",
            "offloaded weights and moments live there, per rank",
        ),
        (
            "fewer dataloader workers (dataloader_num_workers), less prefetching, a streamed dataset",
            "each worker holds batches, and a copy of what the parent had touched",
        ),
        (
            "load weights rank by rank, in bf16 (low_cpu_mem_usage=True)",
            "every rank loading at once multiplies the copies",
        ),
    ]


def _ray_monitor(failure: Failure, names: Names) -> Answer:
    used, total, task = _size(failure, "used"), _size(failure, "total"), _size(failure, "task_used")
    if used is None and failure.facts.get("used_gib"):
        used, total = (f"{float(failure.facts[n]):.2f} GiB" for n in ("used_gib", "total_gib"))
    figures = f" at {used} of {total}" if used and total else ""
    threshold = failure.facts.get("threshold")
    over = f", above its threshold of {float(threshold):g}" if isinstance(threshold, (int, float)) else ""
    small = ""
    if (
        task is not None
        and isinstance(failure.facts.get("task_used"), int)
        and isinstance(failure.facts.get("used"), int)
    ):
        share = int(failure.facts["task_used"]) / max(1, int(failure.facts["used"]))
        if share < 0.25:
            small = f" The worker it ended held only {task}: it was picked for being the newest, the rest is in others."
    because = (
        f"Ray's memory monitor ended a worker: {_HOST_IS_NOT_THE_GPU}. The node was"
        f"{figures or ' short of memory'}{over}.{small}"
    )
    return because, [
        (
            "`ray logs raylet.out`, `ray memory`, and top on that node: who holds the rest",
            "the node's memory is shared by all workers, the object store and whatever else runs there",
        ),
        *_less(names),
        (
            "RAY_memory_usage_threshold=0.98 (RAY_memory_monitor_refresh_ms=0 switches the monitor off)",
            "gives a little room; without the monitor the kernel kills instead",
        ),
    ]


def _ray_worker(failure: Failure, names: Names) -> Answer:
    return (
        "a Ray worker died without a Python error. Most often the kernel killed it because the host's memory ran out; "
        "a crash in native code or `ray stop` look the same, so confirm it first.",
        [
            (
                "`dmesg -T | grep -i kill` on that node, the container's events, `ray logs raylet.out`",
                "the kernel or the container says there whether it was memory",
            ),
            (
                "ulimit -c / the worker's own .err log under /tmp/ray/session_latest/logs",
                "a segmentation fault or an assertion shows there instead",
            ),
            *_less(names),
        ],
    )


def _ray_store(failure: Failure, names: Names) -> Answer:
    return "Ray's object store is full: shared memory of the host that holds objects passed between workers.", [
        (
            "ray start --object-store-memory=<bytes>, with a /dev/shm at least as large (--shm-size, emptyDir "
            "medium: Memory)",
            "the store lives in /dev/shm",
        ),
        (
            "`ray memory`: delete references to large rollouts, pass them by smaller batches",
            "an object stays while anyone refers to it",
        ),
    ]


def _kernel(failure: Failure, names: Names) -> Answer:
    anon, limit, used = _size(failure, "anon"), _size(failure, "limit"), _size(failure, "used")
    who = f" ({failure.facts['name']})" if failure.facts.get("name") else ""
    held = f", which held {anon} of its own" if anon else ""
    in_group = failure.form.id == "kernel.cgroup" or failure.facts.get("constraint") == "memcg" or limit is not None
    where = (
        "a memory cgroup (a container or a job) reached its limit"
        if in_group
        else "the whole machine ran out of memory"
    )
    figures = f" of {limit}" if limit else ""
    pid = failure.facts.get("pid")
    victim = f"process {pid}{who}" if pid else f"a process{who}"
    because = f"the kernel killed {victim}{held}: {where}{figures}; {_HOST_IS_NOT_THE_GPU}."
    if in_group and anon and isinstance(failure.facts.get("anon"), int) and int(failure.facts["anon"]) < GIB:
        because += " The victim is small: others in the same container hold the rest."
    if used and limit:
        because += f" It used {used}."
    first: Remedy = (
        "raise the container's or the job's memory limit (docker --memory, resources.limits.memory, sbatch --mem)",
        "the limit is the group's, the machine may have more",
    )
    if not in_group:
        first = (
            "see in the kernel's table above that line which processes held the most",
            "the victim is not always the cause",
        )
    return because, [first, *_less(names)]


def _not_flagged(failure: Failure, names: Names) -> Answer:
    return (
        "exit code 137 is 128 + 9: the process got SIGKILL, and the container's state does not say that it went over "
        "its own memory limit. The node's memory may have run out, a probe or a timeout may have ended it, or "
        "someone did.",
        [
            ("`kubectl get events`, or `dmesg -T | grep -i kill` on the node: who sent it", "it is said there only"),
            ("the liveness probe's and the job's timeouts", "a container that does not answer or stop gets SIGKILL"),
            *_less(names),
        ],
    )


def _container(failure: Failure, names: Names) -> Answer:
    if failure.form.id == "container.137" and _NOT_OOMKILLED.search(failure.around):
        return _not_flagged(failure, names)
    sure = failure.form.id != "container.137"
    because = (
        "the container was ended for going over its memory limit: "
        if sure
        else "exit code 137 is 128 + 9: the process got SIGKILL, in a container mostly for going over its memory "
        "limit: "
    ) + f"{_HOST_IS_NOT_THE_GPU}."
    return because, [
        (
            "kubectl describe pod / docker inspect (OOMKilled, limits), and raise resources.limits.memory (docker "
            "--memory)",
            "the limit is the container's, whatever the machine has",
        ),
        *_less(names),
        (
            "count /dev/shm and page cache of emptyDir medium: Memory too",
            "shared memory counts into the container's limit",
        ),
    ]


def _evicted(failure: Failure, names: Names) -> Answer:
    used = _size(failure, "used")
    return (
        f"Kubernetes evicted the pod because its node ran low on host "
        f"memory{f' (the container used {used})' if used else ''}.",
        [
            (
                "resources.requests.memory equal to what the run needs (and limits the same)",
                "pods above their request are evicted first",
            ),
            *_less(names),
        ],
    )


def _slurm(failure: Failure, names: Names) -> Answer:
    return f"Slurm's cgroup killed tasks of the job for going over the memory it asked for: {_HOST_IS_NOT_THE_GPU}.", [
        (
            "sbatch --mem=<more> (or --mem-per-gpu, --mem-per-cpu; --mem=0 is the whole node)",
            "a job gets a limit, not the node",
        ),
        ("`sacct -j JOB --format=JobID,MaxRSS,ReqMem,State`", "how far over it went, and in which step"),
        *_less(names),
    ]


def _scheduler(failure: Failure, names: Names) -> Answer:
    used, limit = _size(failure, "used"), _size(failure, "limit")
    figures = f" ({used} of {limit})" if used and limit else ""
    return f"the scheduler ended the job at its memory limit{figures}: {_HOST_IS_NOT_THE_GPU}.", [
        ("ask for more memory (PBS -l mem=, LSF -M and rusage[mem=])", "a job gets a limit, not the node"),
        *_less(names),
    ]


def _launcher(failure: Failure, names: Names) -> Answer:
    rank = f"local rank {failure.rank}" if failure.rank is not None else "a process"
    return (
        f"{rank} ended with SIGKILL (−9, or 137 = 128 + 9), which no Python code sends by itself: mostly the kernel, "
        f"because {_HOST_IS_NOT_THE_GPU.replace(', not', ' ran out, not')}. It can also be the launcher ending the "
        "others after one rank failed: then the first failure above counts.",
        [
            (
                "`dmesg -T | grep -i kill`, the container's events or `sacct`: who was killed, at what size",
                "the kernel says it there only",
            ),
            *_less(names),
        ],
    )


def _dataloader(failure: Failure, names: Names) -> Answer:
    return (
        f"a process that prepares data was killed, mostly because "
        f"{_HOST_IS_NOT_THE_GPU.replace(', not', ' ran out, not')}.",
        [
            (
                "lower num_workers (dataset.map: num_proc) and prefetch_factor; stream or memory-map the dataset",
                "each worker holds batches, and a copy of what the parent had touched",
            ),
            ("writer_batch_size and batch_size of dataset.map lower", "that many rows are held by each process"),
            ("`dmesg -T | grep -i kill`", "the kernel says there whether it was memory"),
        ],
    )


def _colab(failure: Failure, names: Names) -> Answer:
    return f"the notebook's machine ran out of RAM: {_HOST_IS_NOT_THE_GPU}.", [
        (
            "load weights straight onto the GPU: device_map='auto', low_cpu_mem_usage=True, bf16 or 4 bits",
            "a checkpoint loaded on the CPU first needs the RAM for all of it",
        ),
        ("a runtime with high RAM", "the free ones have about 12 GiB"),
    ]


def _shm(failure: Failure, names: Names) -> Answer:
    return (
        "/dev/shm is full: shared memory through which workers pass tensors. Docker gives it 64 MB unless told "
        "otherwise.",
        [
            (
                "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at /dev/shm",
                "the size of /dev/shm, not of the machine's memory, is what ran out",
            ),
            (
                "num_workers=0, or torch.multiprocessing.set_sharing_strategy('file_system')",
                "no tensors in /dev/shm, or as files elsewhere",
            ),
            ("`df -h /dev/shm`, and remove what dead runs left there", "segments of killed processes stay"),
        ],
    )


def _mappings(failure: Failure, names: Names) -> Answer:
    return (
        "the operating system refused to map a small piece of shared memory: mostly the process has as many mappings "
        "as it may have (one for each shared tensor), else an address space limit or host memory. /dev/shm itself "
        "has room.",
        [
            ("sysctl -w vm.max_map_count=1048576", "the default is 65,530 mappings for a process"),
            (
                "share fewer, larger tensors; del those that came from workers once they are copied",
                "each one that is alive keeps its mapping",
            ),
            (
                "torch.multiprocessing.set_sharing_strategy('file_system'), ulimit -v unlimited",
                "other limits to rule out",
            ),
        ],
    )


def _windows(failure: Failure, names: Names) -> Answer:
    return "Windows could not promise the memory (error 1455): RAM plus paging file is what processes may commit.", [
        (
            "enlarge the paging file (System > Advanced > Performance > Virtual memory), on a disk with room",
            "Windows counts what is asked for, not what is touched: every process that imports CUDA libraries takes "
            "GiBs",
        ),
        ("num_workers=0 in the dataloader, fewer Python processes", "each worker loads the libraries again"),
        ("low_cpu_mem_usage=True, bf16, safetensors read in parts", "a mapped checkpoint counts in full"),
    ]


def _cpu(failure: Failure, names: Names) -> Answer:
    asked = failure.requested
    size = f"a tensor of {format_bytes(asked)} on the CPU" if asked else "a tensor on the CPU"
    if asked and asked >= 2**50:
        return f"{size} is no size a program means: a dimension is negative, overflowed or garbage.", [
            ("print the shapes that go into the operation the traceback ends in", "one of them is wrong"),
        ]
    return f"{size} did not fit: {_HOST_IS_NOT_THE_GPU}; the machine or its container has no such block left.", [
        ("look for a tensor on the CPU that was meant for the device", "a model or a mask that was never moved, often"),
        ("load in bf16 with low_cpu_mem_usage=True, or device_map='auto'", "fp32 on the CPU first is twice the bytes"),
        ("lower dataloader workers and prefetching; stream the dataset", "each worker holds batches of its own"),
        (
            "a larger paging file or swap (Windows: commit limit; containers: their limit)",
            "what may be promised, not what is free",
        ),
    ]


def _python(failure: Failure, names: Names) -> Answer:
    size = f" {format_bytes(failure.requested)} in one array" if failure.requested else ""
    return (
        f"Python, numpy or a library asked the operating system for{size or ' memory'} and got none: "
        f"{_HOST_IS_NOT_THE_GPU}.",
        [
            ("stream or memory-map the dataset; fewer dataloader workers", "each worker holds copies of its own"),
            (
                "load with low_cpu_mem_usage=True, in bf16",
                "a second copy of the weights is made on the host while loading",
            ),
            (
                "check the limits: ulimit -v, the container's memory, overcommit (vm.overcommit_memory)",
                "the machine may have more than the process may use",
            ),
        ],
    )


def _pinned(failure: Failure, names: Names) -> Answer:
    return (
        "page-locked (pinned) host memory ran out or may not be locked: it cannot be swapped and has limits of its "
        "own.",
        [
            (
                "dataloader_pin_memory=False, pin_memory: false in DeepSpeed's offload",
                "pinned buffers round up to powers of two",
            ),
            ("ulimit -l unlimited (docker --ulimit memlock=-1)", "RLIMIT_MEMLOCK bounds what may be locked"),
            *_less(names)[:1],
        ],
    )


def _swap_space(failure: Failure, names: Names) -> Answer:
    return "vLLM's swap space on the CPU is larger than the host allows.", [
        ("lower swap_space (GiB per GPU), 0 in training", "it is reserved on the host for every GPU"),
    ]


def _swap_buffers(failure: Failure, names: Names) -> Answer:
    return (
        "DeepSpeed's pool of pinned buffers for swapping parameters to NVMe is too small: a setting, not the machine.",
        [
            (
                "raise zero_optimization.offload_param.buffer_count (and buffer_size)",
                "one buffer for each parameter in flight",
            ),
        ],
    )


def _nccl_host(failure: Failure, names: Names) -> Answer:
    return f"NCCL could not get host memory: {_HOST_IS_NOT_THE_GPU}.", [
        ("check the container's limit and ulimit -l", "NCCL pins part of what it allocates"),
        *_less(names),
    ]


HOST: dict[str, Callable[[Failure, Names], Answer]] = {
    "ray.monitor": _ray_monitor,
    "ray.low_memory": _ray_monitor,
    "ray.system_low": _ray_monitor,
    "ray.workers_killed": _ray_monitor,
    "ray.old_monitor": _ray_monitor,
    "ray.worker": _ray_worker,
    "ray.maybe": _ray_worker,
    "ray.raylet": _ray_worker,
    "ray.pod": _container,
    "ray.object_store": _ray_store,
    "slurm": _slurm,
    "pbs.limit": _scheduler,
    "lsf.limit": _scheduler,
    "kernel": _kernel,
    "systemd.oomd": _kernel,
    "container": _container,
    "kubernetes.evicted": _evicted,
    "launcher": _launcher,
    "dataloader.killed": _dataloader,
    "datasets.died": _dataloader,
    "pool.died": _dataloader,
    "colab.ram": _colab,
    "jupyter.died": _colab,
    "shm.mappings": _mappings,
    "shm": _shm,
    "nccl.shared_memory": _shm,
    "windows": _windows,
    "torch.cpu": _cpu,
    "numpy": _python,
    "pinned": _pinned,
    "errno.12": _python,
    "cpp.bad_alloc": _python,
    "java.heap": _python,
    "python.memory_error": _python,
    "vllm.swap_space": _swap_space,
    "deepspeed.swap_buffers": _swap_buffers,
    "nccl.host": _nccl_host,
}
