"""Texts that sound like memory and are about something else, each with the sentence that says so."""

from __future__ import annotations

from memprof.oom.form import Form, form

__all__ = ["FORMS", "SENTENCES"]

FORMS: tuple[Form, ...] = (
    form(
        "kernel_shared_memory",
        "not_memory",
        "Triton",
        r"out of resources?:? ?(?:shared memory|registers|tensor memory)|outofresources|uses too much shared data",
    ),
    form("launch_resources", "not_memory", "CUDA", r"too many resources requested for launch"),
    form("illegal_access", "not_memory", "CUDA", r"an illegal memory access was encountered|misaligned address"),
    form("device_assert", "not_memory", "CUDA", r"device-side assert triggered"),
    form("disk_full", "not_memory", "the file system", r"no space left on device|disk quota exceeded"),
    form("open_files", "not_memory", "the operating system", r"too many open files|received 0 items of ancdata"),
    form(
        "process_limit",
        "not_memory",
        "the operating system",
        r"can't start new thread|pthread_create failed|\[errno 11\] resource temporarily unavailable",
    ),
    form(
        "invalid_argument",
        "not_memory",
        "the CUDA driver",
        r"cuda error: invalid argument|error invalid argument at line \d{1,6} in file"
        r"|curesult error:? ?result=1(?!\d)",
    ),
    form(
        "segfault",
        "not_memory",
        "the operating system",
        r"segmentation fault|sigsegv|signal 11|exitcode ?: ?-11(?!\d)",
    ),
    form(
        "context_length", "not_memory", "the server", r"maximum context length is|longer than the maximum model length"
    ),
    form("nccl_timeout", "not_memory", "NCCL", r"watchdog caught collective operation timeout"),
)

SENTENCES: dict[str, str] = {
    "kernel_shared_memory": "a kernel asks for more on-chip shared memory or registers than the GPU has: not device "
    "memory; use smaller block sizes or fewer stages (num_stages), or another attention backend",
    "launch_resources": "a kernel asks for more registers or threads than a block may have: not device memory",
    "illegal_access": "a kernel read or wrote outside its tensors: a bug or an index out of range, not a lack of "
    "memory; CUDA_LAUNCH_BLOCKING=1 shows where",
    "device_assert": "a kernel's assertion failed, mostly an index out of range: not a lack of memory; "
    "CUDA_LAUNCH_BLOCKING=1 shows where",
    "disk_full": "a disk is full, not memory",
    "open_files": "the process has too many open files, not too little memory (ulimit -n)",
    "process_limit": "the system or the container allows no more threads or processes (ulimit -u, pids.max), not "
    "memory",
    "invalid_argument": "the driver was given an argument that it does not accept, such as memory mapped or released "
    "twice, or a library that does not fit the driver: not a lack of memory by itself",
    "segfault": "the process crashed on a bad address, which is a bug and not a lack of memory",
    "context_length": "a request is longer than the model's context: a limit of tokens, not a lack of memory",
    "nccl_timeout": "a collective timed out: one rank waits for another, which may have failed for another reason",
}
