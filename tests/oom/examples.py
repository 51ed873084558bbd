"""One example of every form: the text as its program prints it, and what has to be read from it.

Where a program's source was read, the wording is its format string filled in; numbers are made up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["EXAMPLES", "NOT_MEMORY_EXAMPLES", "Example"]

M = 2**20
G = 2**30


class Example(NamedTuple):
    text: str
    facts: Mapping[str, Any]
    where: str  # the source of the wording, versions


VLLM_WORKER = "vllm/v1/worker/gpu_worker.py"

EXAMPLES: dict[str, Example] = {
    # -- vLLM ------------------------------------------------------------------------------------------------------
    "vllm.free_below_share": Example(
        "ValueError: Free memory on device cuda:0 (5.01/6.0 GiB) on startup is less than desired GPU memory "
        "utilization "
        "(0.9, 5.4 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        {"free_gib": 5.01, "total_gib": 6.0, "share": 0.9, "wanted_gib": 5.4},
        f"{VLLM_WORKER}, 0.9 to 0.28",
    ),
    "vllm.free_below_share_short": Example(
        "ValueError: free mem on startup is less than desired GPU memory utilization", {}, "shortened by hand"
    ),
    "vllm.no_cache_blocks": Example(
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
        "initializing the engine.",
        {},
        "vllm/worker/worker.py 0.2, v1/core/kv_cache_utils.py",
    ),
    "vllm.context_too_long": Example(
        "ValueError: To serve at least one request with the model's max seq len (700160), (6.11 GiB KV cache is "
        "needed, "
        "which is larger than the available KV cache memory (5.17 GiB). Based on the available memory, the estimated "
        "maximum model length is 566784. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.",
        {"wanted_tokens": 700160, "needed_gib": 6.11, "available_gib": 5.17, "fitting_tokens": 566784},
        "v1/core/kv_cache_utils.py, 0.8 to 0.28; also without the parenthesis and the estimate",
    ),
    "vllm.context_over_cache": Example(
        "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in "
        "KV cache (15248). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing.",
        {"wanted_tokens": 32768, "fitting_tokens": 15248},
        "vllm/worker/worker.py, 0.2 to 0.8",
    ),
    "vllm.context_too_long_short": Example(
        "vllm: needed KV is larger than the available KV cache memory", {}, "shortened by hand"
    ),
    "vllm.profiling": Example(
        "AssertionError: Error in memory profiling. Initial free memory 25032982528, current free memory 25049759744. "
        "This happens when the GPU memory was not properly cleaned up before initializing the vLLM instance.",
        {"initial": 25032982528.0, "current": 25049759744.0},
        f"{VLLM_WORKER}; bytes to 0.8, GiB since",
    ),
    "vllm.sampler_warmup": Example(
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try "
        "lowering "
        "`max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
        {"requests": 256},
        "v1/worker/gpu_model_runner.py",
    ),
    "vllm.load_model": Example(
        "ERROR 10-25 13:08:43 [gpu_model_runner.py:2820] Failed to load model - not enough GPU memory. Try lowering "
        "--gpu-memory-utilization to free memory for weights, increasing --tensor-parallel-size, or using "
        "--quantization.",
        {},
        "v1/worker/gpu_model_runner.py",
    ),
    "vllm.expandable_segments": Example(
        "AssertionError: Expandable segments are not compatible with memory pool. Please track "
        "https://github.com/pytorch/pytorch/issues/147851 for the latest updates.",
        {},
        "device_allocator/cumem.py",
    ),
    "vllm.wake": Example(
        "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62\n"
        "CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:64",
        {},
        "csrc/cumem_allocator.cpp",
    ),
    "vllm.sleep": Example("AssertionError: Memory usage increased after sleeping.", {}, VLLM_WORKER),
    "vllm.swap_space": Example(
        "ValueError: Too large swap space. 32.00 GiB out of the 31.20 GiB total CPU memory is allocated for the swap "
        "space.",
        {"wanted": 32 * G, "total": round(31.2 * G)},
        "vllm/config.py",
    ),
    "vllm.graph_capture": Example("RuntimeError: CUDA graph capture failed: CUDA error: out of memory", {}, "vllm"),
    # -- SGLang and torch_memory_saver -----------------------------------------------------------------------------
    "torch_memory_saver.expandable_segments": Example(
        "RuntimeError: TorchMemorySaver is disabled for the current process because expandable_segments is not "
        "supported yet.",
        {},
        "torch_memory_saver/entrypoint.py",
    ),
    "torch_memory_saver.resume": Example(
        "[torch_memory_saver.cpp] cudaError error: 2 (out of memory)  file=csrc/core.cpp func=resume line=174",
        {"function": "resume"},
        "csrc/core.cpp, csrc/macro.h",
    ),
    "torch_memory_saver.check": Example(
        "CUresult error: 2 (out of memory) file=csrc/utils.h func=cu_mem_create", {}, "csrc/macro.h"
    ),
    "sglang.no_pool": Example(
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
        "mem_fraction_static=0.84",
        {"share": 0.84},
        "model_runner.py 0.1, pool_configurator.py",
    ),
    "sglang.prefill": Example(
        "RuntimeError: Prefill out of memory. Try to lower your batch size.\nTry to allocate 2177 tokens.\n"
        "Available tokens: 1936 (available_size=400 + evictable_size=1536)",
        {"wanted_tokens": 2177, "available_tokens": 1936},
        "mem_cache/common.py",
    ),
    "sglang.decode": Example(
        "Decode out of memory. Try to lower your batch size.\nTry to allocate 64 tokens.\nAvailable tokens: 12",
        {"wanted_tokens": 64, "available_tokens": 12},
        "schedule_batch.py, mem_cache/common.py",
    ),
    "sglang.tokens": Example(
        "RuntimeError: Out of memory. Try to lower your batch size.\nTry to allocate 8192 tokens.\nAvailable tokens: "
        "3391 (full_available_size=3391 + full_evictable_size=0)",
        {"wanted_tokens": 8192, "available_tokens": 3391},
        "mem_cache/common.py, alloc_token_slots",
    ),
    "sglang.retracted": Example(
        "[2025-01-01 12:00:00 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_token_ratio: "
        "0.5 -> 0.7",
        {},
        "managers/scheduler.py, older: Decode out of memory happened.",
    ),
    "tgi.warmup": Example(
        "RuntimeError: Not enough memory to handle 4096 prefill tokens. You need to decrease "
        "`--max-batch-prefill-tokens`",
        {"prefill_tokens": 4096},
        "text_generation_server/models/flash_causal_lm.py",
    ),
    "sglang.request_rows": Example(
        "RuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for `--max-running-requests`.",
        {},
        "mem_cache/common.py",
    ),
    "sglang.graph_capture": Example(
        "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total "
        "capacity of 79.10 GiB of which 1.75 MiB is free.\nPossible solutions:\n1. set --mem-fraction-static to a "
        "smaller "
        "value (e.g., 0.8 or 0.7)\n2. set --cuda-graph-max-bs to a smaller value (e.g., 16)",
        {},
        "model_executor/cuda_graph_runner.py",
    ),
    "sglang.unbalanced": Example(
        "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
        "pre_model_load_memory=70.2, local_gpu_memory=78.9",
        {},
        "model_runner.py",
    ),
    "lmdeploy.no_memory": Example("RuntimeError: No enough gpu memory for runtime.", {}, "pytorch/engine/executor"),
    "flashinfer.workspace": Example(
        "RuntimeError: Error in function 'aligned_alloc' at allocator.h:49: Failed to allocate memory for "
        "batch_prefill_tmp_v with size 402653184 and alignment 16 in AlignedAllocator",
        {"wanted_bytes": 402653184},
        "include/flashinfer/allocator.h",
    ),
    # -- libraries -------------------------------------------------------------------------------------------------
    "nccl.shared_memory": Example(
        "node3:871:1023 [2] misc/shmutils.cc:72 NCCL WARN Error while creating shared memory segment "
        "/dev/shm/nccl-W2tqUG (size 9637888)",
        {"wanted_bytes": 9637888},
        "src/misc/shmutils.cc",
    ),
    "nccl.alloc": Example(
        "node3:871:1023 [2] include/alloc.h:185 NCCL WARN Failed to CUDA calloc async 4194304 bytes",
        {"requested": 4194304},
        "src/include/alloc.h 2.4 to 2.27; RCCL too",
    ),
    "nccl.failure": Example(
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1275, unhandled cuda error, NCCL "
        "version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of "
        "memory'",
        {},
        "src/include/checks.h, torch NCCLUtils",
    ),
    "nccl.host": Example("NCCL WARN Failed to malloc 8388608 bytes", {"requested": 8388608}, "src/include/alloc.h"),
    "bitsandbytes.check": Example(
        "Error out of memory at line 380 in file /mmfs1/gscratch/git/bitsandbytes/csrc/ops.cu", {}, "csrc/ops.cuh"
    ),
    "bitsandbytes.check_plain": Example(
        "Error out of memory at line 88 in file /src/csrc/kernels.hip", {}, "csrc/compat.cuh"
    ),
    "deepspeed.swap_buffers": Example(
        "AssertionError: Not enough buffers 5 for swapping 6", {"available": 5}, "runtime/swap_tensor"
    ),
    "cublas.alloc": Example(
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", {}, "torch"
    ),
    "cublas.not_initialized": Example("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", {}, "torch"),
    "cufft.alloc": Example("RuntimeError: cuFFT error: CUFFT_ALLOC_FAILED", {}, "torch"),
    "rocblas.alloc": Example("rocBLAS error: rocblas_status_memory_error", {}, "rocBLAS"),
    "cudnn.no_algorithm": Example(
        "RuntimeError: Unable to find a valid cuDNN algorithm to run convolution",
        {},
        "torch 1.x; 2.x: GET was unable to find an engine",
    ),
    "cupy": Example(
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,073,741,824 bytes (allocated so far: "
        "3,221,225,472 bytes).",
        {},
        "cupy/cuda/memory.pyx",
    ),
    "jax": Example(
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 "
        "bytes.",
        {"wanted": 17179869184.0},
        "xla",
    ),
    "tensorflow": Example(
        "ResourceExhaustedError: OOM when allocating tensor with shape[64,512,768] and type float on /job:localhost",
        {"shape": "64,512,768"},
        "tensorflow/core",
    ),
    "tensorflow.driver": Example(
        "cuda_driver.cc:601] failed to allocate 7.35G (7889485824 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY",
        {"requested": round(7.35 * G), "bytes": 7889485824},
        "tensorflow stream_executor",
    ),
    "ggml": Example(
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 5563.55 MiB on device 0: cudaMalloc failed: out of "
        "memory",
        {"requested": round(5563.55 * M), "device": 0},
        "ggml-cuda.cu",
    ),
    "onnxruntime": Example(
        "bfc_arena.cc:376 AllocateRawInternal Failed to allocate memory for requested buffer of size 67108864",
        {"requested": 67108864},
        "onnxruntime bfc_arena.cc",
    ),
    "paddle": Example(
        "ResourceExhaustedError: Out of memory error on GPU 0. Cannot allocate 1.125000GB memory on GPU 0, 15.0GB "
        "memory "
        "has been allocated",
        {"device": 0, "requested": round(1.125 * G)},
        "paddle",
    ),
    # -- accelerators ----------------------------------------------------------------------------------------------
    "xpu.runtime": Example(
        "RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        {},
        "unified-runtime; older: Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)",
    ),
    "mps.buffer": Example("RuntimeError: Invalid buffer size: 14.20 GiB", {"requested": round(14.2 * G)}, "aten mps"),
    "mps.command_buffer": Example(
        "Error: command buffer exited with error status.\n\tInsufficient Memory "
        "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        {},
        "Metal",
    ),
    "mlx.malloc": Example(
        "RuntimeError: [metal::malloc] Attempting to allocate 22468362240 bytes which is greater than the maximum "
        "allowed "
        "buffer size of 14319550464 bytes.",
        {"requested": 22468362240, "allowed": 14319550464},
        "mlx allocator",
    ),
    "hpu.alloc": Example(
        "RuntimeError: FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::1207959552 (1152)MB",
        {"requested": 1207959552},
        "habana_frameworks",
    ),
    "npu.driver": Example(
        "EL0004: Failed to allocate memory.\n        Possible Cause: Available memory is insufficient.", {}, "CANN"
    ),
    "hip.driver": Example(
        "RuntimeError: HIP error: out of memory\nHIP kernel errors might be asynchronously", {}, "torch"
    ),
    "cuda.thc": Example(
        "RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58",
        {},
        "torch 0.1 to 1.1",
    ),
    "cuda.triton": Example("RuntimeError: Triton Error [CUDA]: out of memory", {}, "triton"),
    "cuda.driver": Example(
        "torch.AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        {},
        "c10/cuda/CUDAException",
    ),
    # -- Ray -------------------------------------------------------------------------------------------------------
    "ray.monitor": Example(
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\nMemory on the node "
        "(IP: "
        "10.0.0.7, ID: 7dbdb3) where the task (actor ID: 0a1b, name=TaskRunner.__init__, pid=77, memory used=101.50GB) "
        "was running was 478.12GB / 503.00GB (0.950537), which exceeds the memory usage threshold of 0.95. Ray killed "
        "this worker (ID: 5e0c) because it was the most recently scheduled task;",
        {
            "used": round(478.12 * G),
            "total": 503 * G,
            "share": 0.950537,
            "threshold": 0.95,
            "task_used": round(101.5 * G),
            "node": "10.0.0.7",
        },
        "src/ray/raylet/worker_killing_policy",
    ),
    "ray.low_memory": Example(
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", {}, "Ray 2"
    ),
    "ray.system_low": Example(
        "(raylet) node_manager.cc:2963: System memory low at node with IP 172.17.0.2. Used memory (23.63GB) / total "
        "capacity (33.28GB) (0.709971) exceeds threshold 0.7, killing latest task with name actor:Leaker.__init__",
        {"used": round(23.63 * G), "total": round(33.28 * G), "threshold": 0.7},
        "Ray 2.0",
    ),
    "ray.workers_killed": Example(
        "(raylet) node_manager.cc:3280: 3 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers "
        "crashed "
        "due to other reasons at node (ID: 06da9d, IP: 172.0.0.1) over the last time period.",
        {"workers": 3},
        "Ray 2",
    ),
    "ray.old_monitor": Example(
        "ray.memory_monitor.RayOutOfMemoryError: More than 95% of the memory on node worker-0 is used (60.35 / 62.58 "
        "GB). "
        "The top 10 memory consumers are:",
        {"percent": 95, "used_gib": 60.35, "total_gib": 62.58},
        "Ray 1",
    ),
    "ray.worker": Example(
        "(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker PID: 27499 "
        "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code "
        "2. End "
        "of file. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high "
        "memory usage. (2) ray stop --force is called.",
        {"pid": 27499, "exit": "system_error"},
        "Ray 2",
    ),
    "ray.pod": Example(
        "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker exits unexpectedly. Worker exits with an exit code "
        "None. The worker may have exceeded K8s pod memory limits.",
        {},
        "Ray 2",
    ),
    "ray.maybe": Example("(1) The process is killed by SIGKILL by OOM killer due to high memory usage.", {}, "Ray 2"),
    "ray.raylet": Example(
        "The node with node id: 5d1e has been marked dead because the detector has missed too many heartbeats from it. "
        "This can happen when a (1) raylet crashes unexpectedly (OOM, etc.) (2) raylet has lagging heartbeats.",
        {},
        "Ray 2 gcs",
    ),
    "ray.object_store": Example(
        "ray.exceptions.ObjectStoreFullError: Failed to put object ffff in object store because it is full. Object "
        "size "
        "is 1073741880 bytes.",
        {},
        "Ray",
    ),
    # -- schedulers ------------------------------------------------------------------------------------------------
    "slurm.oom_kill": Example(
        "slurmstepd: error: Detected 2 oom-kill event(s) in StepId=4711.batch. Some of your processes may have been "
        "killed by the cgroup out-of-memory handler.",
        {"events": 2, "step": 4711},
        "slurmstepd 17 to 24",
    ),
    "slurm.oom_kill_short": Example("slurmstepd: error: Detected 1 oom_kill event", {}, "cut"),
    "slurm.tasks_killed": Example("Some of the step tasks have been OOM Killed.", {}, "cut"),
    "slurm.limit": Example("slurmstepd: error: Exceeded job memory limit at some point.", {}, "Slurm 14 to 18"),
    "slurm.task": Example("srun: error: node017: task 3: Out Of Memory", {"node": "node017"}, "srun"),
    "slurm.state": Example("State: OUT_OF_MEMORY (exit code 0)", {}, "seff, sacct"),
    "pbs.limit": Example(
        "=>> PBS: job killed: mem 33592832kb exceeded limit 33554432kb", {"used": 33592832 * 1024}, "PBS"
    ),
    "lsf.limit": Example("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.", {}, "LSF"),
    # -- the kernel and containers ---------------------------------------------------------------------------------
    "kernel.cgroup": Example(
        "[882.1] Memory cgroup out of memory: Killed process 9001 (python) total-vm:91234500kB, anon-rss:65011712kB, "
        "file-rss:0kB, shmem-rss:0kB, UID:0",
        {"pid": 9001, "name": "python", "anon": 65011712 * 1024},
        "mm/oom_kill.c",
    ),
    "kernel.machine": Example(
        "Nov 20 10:01:02 gpu1 kernel: Out of memory: Kill process 4711 (ray::Actor) score 901 or sacrifice child",
        {"pid": 4711, "name": "ray::actor"},
        "mm/oom_kill.c, 2.6 to 5.2; later: Killed process",
    ),
    "kernel.constraint": Example(
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/kubepods/pod1",
        {"constraint": "memcg"},
        "mm/oom_kill.c",
    ),
    "kernel.limit": Example(
        "memory: usage 67108864kB, limit 67108864kB, failcnt 8812", {"limit": 64 * G}, "mm/memcontrol.c"
    ),
    "kernel.invoked": Example("python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0", {}, "mm/oom_kill.c"),
    "kernel.killed": Example(
        "Killed process 812 (python3), UID 1000, total-vm:30123456kB, anon-rss:15012345kB, file-rss:1kB",
        {"pid": 812, "anon": 15012345 * 1024},
        "mm/oom_kill.c",
    ),
    "kernel.reaper": Example(
        "oom_reaper: reaped process 812 (python3), now anon-rss:0kB", {"pid": 812}, "mm/oom_kill.c"
    ),
    "systemd.oomd": Example(
        "user@1000.service: A process of this unit has been killed by the OOM killer.", {}, "systemd"
    ),
    "kubernetes.oomkilled": Example(
        "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137", {}, "kubectl describe"
    ),
    "kubernetes.evicted": Example(
        "The node was low on resource: memory. Threshold quantity: 100Mi, available: 88Mi. Container trainer was using "
        "118Gi, request is 64Gi, has larger consumption of memory.",
        {"used": 118 * G},
        "kubelet eviction",
    ),
    "container.limit": Example("Memory limit exceeded (16Gi)", {"limit": 16 * G}, "Hugging Face Spaces; YARN, Kaggle"),
    "container.137": Example("command terminated with exit code 137", {}, "docker, kubectl, nextflow, GitHub"),
    # -- launchers -------------------------------------------------------------------------------------------------
    "torchrun.table": Example(
        "  rank      : 11 (local_rank: 3)\n  exitcode  : -9 (pid: 41)\n  error_file: <N/A>",
        {"pid": 41},
        "torch elastic",
    ),
    "torchrun.exitcode": Example(
        "E1120 10:00:00 torch/distributed/elastic/multiprocessing/api.py:826] failed (exitcode: -9) local_rank: 5 "
        "(pid: "
        "3421) of binary: /usr/bin/python",
        {"pid": 3421},
        "torch/distributed/elastic",
    ),
    "torchrun.signal": Example("  traceback : Signal 9 (SIGKILL) received by PID 41", {"pid": 41}, "torch elastic"),
    "deepspeed.return_code": Example(
        "[2024-08-02 01:24:59,694] [ERROR] [launch.py:321:sigkill_handler] ['python', '-u', 'train.py', "
        "'--local_rank=0'] "
        "exits with return code = -9",
        {},
        "deepspeed/launcher/launch.py",
    ),
    "launcher.sigkill": Example(
        "subprocess.CalledProcessError: Command '['python', 'train.py']' died with <Signals.SIGKILL: 9>.",
        {},
        "accelerate, torch.multiprocessing, mpirun, systemd",
    ),
    "dataloader.killed": Example(
        "RuntimeError: DataLoader worker (pid 3212) is killed by signal: Killed.", {"pid": 3212}, "torch"
    ),
    "datasets.died": Example(
        "RuntimeError: One of the subprocesses has abruptly died during map operation.To debug the error, disable "
        "multiprocessing.",
        {},
        "datasets",
    ),
    "pool.died": Example(
        "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly while the "
        "future was running or pending.",
        {},
        "Python",
    ),
    "colab.ram": Example("Your session crashed after using all available RAM.", {}, "Colab"),
    "shell.killed": Example(
        "run.sh: line 12: 88213 Killed                  python train.py --config a.yaml", {}, "bash"
    ),
    "shell.bus_error": Example("Bus error (core dumped)", {}, "bash"),
    "shell.killed_job": Example("[1]    12345 killed     python train.py", {}, "zsh"),
    "shell.killed_zsh": Example("zsh: killed     python train.py", {}, "zsh"),
    "jupyter.died": Example("The kernel appears to have died. It will restart automatically.", {}, "Jupyter"),
    "shell.killed_alone": Example("loading shards: 50%\nKilled", {}, "bash, zsh"),
    # -- shared memory, Windows, allocators ------------------------------------------------------------------------
    "shm.dataloader": Example(
        "RuntimeError: DataLoader worker (pid(s) 46794) is killed by signal: Bus error. It is possible that "
        "dataloader's "
        "workers are out of shared memory.",
        {"pid": 46794},
        "torch signal_handling.py",
    ),
    "shm.insufficient": Example(
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        {},
        "torch",
    ),
    "shm.mappings": Example(
        "RuntimeError: unable to mmap 29764 bytes from file </torch_10182_3020184674_63991>: Cannot allocate memory "
        "(12)",
        {"requested": 29764},
        "aten/src/ATen/MapAllocator.cpp",
    ),
    "shm.file": Example("RuntimeError: unable to write to file </torch_5190_3821>", {}, "torch MapAllocator"),
    "shm.sigbus": Example("traceback : Signal 7 (SIGBUS) received by PID 4711", {}, "torch elastic"),
    "shm.full": Example("OSError: [Errno 28] No space left on device: '/dev/shm/torch_12_34'", {}, "Linux"),
    "windows.paging_file": Example(
        "OSError: [WinError 1455] The paging file is too small for this operation to complete. Error loading "
        '"cudnn_cnn_infer64_8.dll" or one of its dependencies.',
        {},
        "Windows; Rust: os error 1455",
    ),
    "torch.cpu": Example(
        "RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried to "
        "allocate 4294967296 bytes.",
        {"requested": 4 * G},
        "c10/core/impl/alloc_cpu.cpp",
    ),
    "torch.cpu_old": Example(
        "RuntimeError: $ Torch: not enough memory: you tried to allocate 12GB. Buy new RAM! at THGeneral.cpp:204",
        {"requested": 12 * G},
        "TH",
    ),
    "numpy": Example(
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 29.8 GiB for an array with shape (4000000000,) "
        "and "
        "data type float64",
        {"requested": round(29.8 * G)},
        "numpy",
    ),
    "pinned": Example("RuntimeError: cudaHostAlloc failed: out of memory", {}, "CUDA"),
    "errno.12": Example("OSError: [Errno 12] Cannot allocate memory", {}, "Linux"),
    "cpp.bad_alloc": Example("terminate called after throwing an instance of 'std::bad_alloc'", {}, "C++"),
    "java.heap": Example("java.lang.OutOfMemoryError: Java heap space", {}, "JVM"),
    "python.memory_error": Example(
        "Traceback (most recent call last):\n  x = [0] * n\nMemoryError\nnext line", {}, "Python"
    ),
}

NOT_MEMORY_EXAMPLES: dict[str, str] = {
    "kernel_shared_memory": "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, "
    "Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
    "launch_resources": "RuntimeError: CUDA error: too many resources requested for launch",
    "illegal_access": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "device_assert": "RuntimeError: CUDA error: device-side assert triggered",
    "disk_full": "OSError: [Errno 28] No space left on device: 'checkpoint-500/model.safetensors'",
    "open_files": "RuntimeError: received 0 items of ancdata",
    "process_limit": "RuntimeError: can't start new thread",
    "invalid_argument": "[torch_memory_saver.cpp] CUresult error  result=1 file=csrc/torch_memory_saver.cpp",
    "segfault": "Fatal Python error: Segmentation fault",
    "context_length": "openai.BadRequestError: This model's maximum context length is 4096 tokens.",
    "nccl_timeout": "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)",
}
