"""The host's memory: the kernel, containers, schedulers, Ray, launchers, /dev/shm, Windows, CPU allocators.

Read from Linux' ``mm/oom_kill.c`` (2.6 to 6.x), Slurm's ``slurmstepd``, Ray's ``worker_killing_policy`` and
``memory_monitor`` (1.x to 2.5x), torch's ``alloc_cpu.cpp``, ``THGeneral.cpp``, ``signal_handling.py`` and
``elastic/multiprocessing/api.py``, DeepSpeed's ``launch.py``, kubelet's eviction manager.
"""

from __future__ import annotations

from memprof.oom.form import Form, form

__all__ = ["FORMS", "WEAK_FORMS"]

FORMS: tuple[Form, ...] = (
    # -- Ray ----------------------------------------------------------------------------------------------------
    form(
        "ray.monitor",
        "killed",
        "Ray",
        r"memory on the node \((?:ip: ?(?P<node>[\w.:-]{1,60}?),)?[^()]{0,200}?\) where the (?:task|actor|lease) "
        r"(?:\(.{0,400}?"
        r"(?:memory used={size:task_used}\))? ?)?was running was {size:used}/{size:total} \({num:share}\),which "
        r"exceeds the "
        r"memory usage threshold of {num:threshold}",
        event="ray.monitor",
    ),
    form("ray.low_memory", "killed", "Ray", r"was killed due to the node running low on memory", event="ray.monitor"),
    form(
        "ray.system_low",
        "killed",
        "Ray",
        r"system memory low at node with ip {word:node}\. ?used memory \({size:used}\)/total capacity \({size:total}\) "
        r"\({num:share}\) exceeds threshold {num:threshold}",
        event="ray.monitor",
    ),
    form(
        "ray.workers_killed",
        "killed",
        "Ray",
        r"{int:workers} workers? \(tasks ?/ ?actors\) killed due to memory pressure \(oom\)",
        event="ray.monitor",
    ),
    form(
        "ray.old_monitor",
        "killed",
        "Ray",
        r"more than {int:percent}% of the memory on node .{1,80}? is used \({num:used_gib}/{num:total_gib} gb\)",
        event="ray.monitor",
    ),
    form("ray.pod", "killed", "Ray", r"the worker may have exceeded k8s pod memory limits", event="ray.worker"),
    form(
        "ray.worker",
        "killed",
        "Ray",
        r"(?:worker pid: ?{int:pid} .{0,40}?)?worker exit type: ?(?P<exit>[a-z_]{3,40}?) worker exit detail: ?"
        r"worker (?:unexpectedly exits|exits unexpectedly)[^(]{0,140}?(?:potential root causes|connection error code "
        r"2)",
        event="ray.worker",
    ),
    form("ray.maybe", "killed", "Ray", r"the process is killed by sigkill by oom killer", event="ray.worker"),
    form(
        "ray.raylet",
        "killed",
        "Ray",
        r"raylet crashes unexpectedly \(oom|raylet is terminated\. ?termination is unexpected",
        event="ray.worker",
    ),
    form(
        "ray.object_store",
        "host",
        "Ray",
        r"objectstorefullerror|the (?:local )?object store is full|failed to put object[^\n]{0,160}?because it is full",
    ),
    # -- Slurm and other schedulers ------------------------------------------------------------------------------
    form(
        "slurm.oom_kill",
        "killed",
        "Slurm",
        r"detected {int:events} oom[-_]kill event(?:\(s\)|s)? in (?:stepid=|step ?){int:step}",
        event="slurm",
    ),
    form("slurm.oom_kill_short", "killed", "Slurm", r"detected \d{1,6} oom[-_]kill event", event="slurm"),
    form(
        "slurm.tasks_killed",
        "killed",
        "Slurm",
        r"some of (?:your |the |the step )?(?:step )?(?:tasks|processes) (?:may )?have been (?:oom killed|killed by "
        r"the cgroup out-of-memory handler)",
        event="slurm",
    ),
    form(
        "slurm.limit",
        "killed",
        "Slurm",
        r"exceeded (?:step|job) memory limit|exceeded memory limit \({int:used}>{int:limit}\)|job {int:job} exceeded "
        r"(?:hard )?memory limit",
        event="slurm",
    ),
    form(
        "slurm.task", "killed", "Slurm", r"srun: error: {word:node}: tasks? [\d,-]{1,40}: out of memory", event="slurm"
    ),
    form(
        "slurm.state",
        "killed",
        "Slurm",
        r"(?:state: ?)?out_of_me(?:mory \(exit code|\+)|state: ?out_of_memory",
        event="slurm",
    ),
    form("pbs.limit", "killed", "PBS", r"job killed: mem {size:used} exceeded limit {size:limit}"),
    form("lsf.limit", "killed", "LSF", r"term_memlimit"),
    # -- the kernel ----------------------------------------------------------------------------------------------
    form(
        "kernel.cgroup",
        "killed",
        "the Linux kernel",
        r"memory cgroup out of memory: kill(?:ed)? process {int:pid} \((?P<name>[^()]{1,40})\)"
        r"(?:[^\n]{0,90}?total-vm:{size:virtual},anon-rss:{size:anon})?",
        event="kernel",
    ),
    form(
        "kernel.machine",
        "killed",
        "the Linux kernel",
        r"out of memory: kill(?:ed)? process {int:pid} \((?P<name>[^()]{1,40})\)"
        r"(?:[^\n]{0,90}?total-vm:{size:virtual},anon-rss:{size:anon})?",
        event="kernel",
    ),
    form(
        "kernel.constraint",
        "killed",
        "the Linux kernel",
        r"oom-kill:constraint=constraint_(?P<constraint>[a-z_]{3,16})",
        event="kernel",
    ),
    form(
        "kernel.limit",
        "killed",
        "the Linux kernel",
        r"memory: usage {size:used},limit {size:limit},failcnt",
        event="kernel",
    ),
    form(
        "kernel.invoked", "killed", "the Linux kernel", r"(?P<name>[\w./-]{1,30}?) invoked oom-killer", event="kernel"
    ),
    form(
        "kernel.killed",
        "killed",
        "the Linux kernel",
        r"killed process {int:pid}(?: \(|,uid)[^\n]{0,60}?total-vm:{size:virtual},anon-rss:{size:anon}",
        event="kernel",
    ),
    form("kernel.reaper", "killed", "the Linux kernel", r"oom_reaper: reaped process {int:pid}", event="kernel"),
    form(
        "systemd.oomd",
        "killed",
        "systemd",
        r"systemd-oomd[^\n]{0,80}?killed|killed by the oom killer|result ?[:=] ?'?oom-kill",
    ),
    # -- containers ----------------------------------------------------------------------------------------------
    form(
        "kubernetes.oomkilled",
        "killed",
        "Kubernetes",
        r"oomkilled(?!\"?[:=]\"?false)|oomkilling",
        event="container",
    ),
    form(
        "kubernetes.evicted",
        "killed",
        "Kubernetes",
        r"the node was low on resource: ?memory(?:\.[^\n]{0,120}?container .{1,60}? was using {size:used}[^\n]{0,40}?"
        r"request (?:of|is) {word:request})?",
    ),
    form(
        "container.limit",
        "killed",
        "the container",
        r"container killed (?:by yarn for exceeding|due to) memory|memory limit exceeded \({size:limit}"
        r"|notebook tried to allocate more memory than is available",
        event="container",
    ),
    form(
        "container.137",
        "killed",
        "the container",
        r"(?:exit (?:code|status)(?: is)?:? ?\(?|exited \(|exitcode\"? ?:? ?|exited with (?:code )?|status code:? "
        r"?|error "
        r"exit status \(|status=|error executing in docker container: ?)137(?!\d)",
        event="container",
    ),
    # -- launchers -----------------------------------------------------------------------------------------------
    form(
        "torchrun.table",
        "killed",
        "torchrun",
        r"local_rank: ?{int:rank}\) exitcode: ?-9(?!\d)(?: ?\(pid: ?{int:pid}\))?",
        event="launcher",
    ),
    form(
        "torchrun.exitcode",
        "killed",
        "torchrun",
        r"exitcode ?: ?-9(?!\d)\)?(?: ?local_rank: ?{int:rank})?(?: ?\(pid: ?{int:pid}\))?",
        event="launcher",
    ),
    form(
        "torchrun.signal",
        "killed",
        "torchrun",
        r"signal 9 \(sigkill\)(?: received by pid {int:pid})?",
        event="launcher",
    ),
    form(
        "deepspeed.return_code",
        "killed",
        "DeepSpeed",
        r"(?:--local_rank= ?{int:rank}(?!\d).{0,600}?)?exits with return code ?= ?-9(?!\d)",
        event="launcher",
    ),
    form(
        "launcher.sigkill",
        "killed",
        "the launcher",
        r"died with <?(?:signals\.)?sigkill|terminated with signal sigkill|exit(?:ed)?(?: with)?(?: exit)? "
        r"(?:code|status) -9(?!\d)"
        r"|returncode -9(?!\d)|exited on signal 9|killed by signal:? ?9|non-zero exit status "
        r"(?:137|-9)(?!\d)|exit_?code=-9(?!\d)"
        r"|(?:status|code)=(?:killed,status=)?9/kill",
        event="launcher",
    ),
    form(
        "dataloader.killed",
        "killed",
        "torch's DataLoader",
        r"dataloader worker \(pid {int:pid}\) is killed by signal: ?killed",
    ),
    form("datasets.died", "killed", "datasets", r"one of the subprocesses has abruptly died during map operation"),
    form("pool.died", "killed", "Python", r"a process in the process pool was terminated abruptly"),
    form(
        "colab.ram",
        "killed",
        "Colab",
        r"your session crashed (?:after using all available ram|for an unknown reason)|session crashed after using "
        r"all available ram",
    ),
    # -- shared memory -------------------------------------------------------------------------------------------
    form(
        "shm.dataloader",
        "host",
        "torch's DataLoader",
        r"dataloader worker \(pid\(?s?\)? {int:pid}\) is killed by signal: ?bus error",
        event="shm",
    ),
    form(
        "shm.insufficient",
        "host",
        "torch's DataLoader",
        r"this might be caused by insufficient shared memory|workers are out of shared memory|insufficient shared "
        r"memory \(shm\)",
        event="shm",
    ),
    form(
        "shm.mappings",
        "host",
        "torch",
        r"unable to mmap {int:requested} bytes from file ?<[^<>]{1,120}>:? ?(?:cannot allocate memory )?\(12\)",
        event="shm",
    ),
    form(
        "shm.file",
        "host",
        "torch",
        r"unable to (?:write to file|open shared memory object|allocate shared memory \(shm\) for file|mmap "
        r"{int:requested} bytes from file) "
        r"?<?/?torch_",
        event="shm",
    ),
    form(
        "shm.sigbus",
        "host",
        "the launcher",
        r"signal 7 \(sigbus\)|exitcode: ?-7(?!\d)\)?(?: ?local_rank: ?{int:rank})?",
        event="shm",
    ),
    form(
        "shm.full",
        "host",
        "/dev/shm",
        r"(?:/dev/shm[^\n]{0,120}?no space left on device|no space left on device[^\n]{0,80}?/dev/shm)",
        event="shm",
    ),
    # -- Windows -------------------------------------------------------------------------------------------------
    form(
        "windows.paging_file",
        "host",
        "Windows",
        r"the paging file is too small for this operation|(?:winerror|os error|error) \[?1455(?!\d)",
        event="windows",
    ),
    # -- allocators on the host ----------------------------------------------------------------------------------
    form(
        "torch.cpu",
        "cpu",
        "torch",
        r"defaultcpuallocator: ?(?:can't allocate memory|not enough memory)(?:: ?you tried to allocate "
        r"{int:requested} bytes)?|cpuallocator\.cpp:\d{1,4}\] posix_memalign",
        event="torch.cpu",
    ),
    form(
        "torch.cpu_old",
        "cpu",
        "torch 0.x",
        r"\$ ?torch: not enough memory: you tried to allocate {size:requested}",
        event="torch.cpu",
    ),
    form("numpy", "host", "numpy", r"unable to allocate {size:requested} for an array", event="memory_error"),
    form(
        "pinned",
        "host",
        "the CUDA driver",
        r"cudahostalloc[^\n]{0,60}?out of memory|cudamallochost[^\n]{0,60}?out of "
        r"memory|cudahostregister[^\n]{0,60}?(?:failed|error)"
        r"|error pinning memory|rlimit_memlock",
    ),
    form(
        "errno.12",
        "host",
        "the operating system",
        r"\[errno 12\] cannot allocate memory|oserror: \[errno 12\]|fork: cannot allocate memory|mmap: cannot "
        r"allocate memory|: cannot allocate memory",
    ),
    form("cpp.bad_alloc", "host", "C++", r"std::bad_alloc"),
    form("java.heap", "host", "Java", r"java\.lang\.outofmemoryerror"),
)

WEAK_FORMS: tuple[Form, ...] = (
    form("python.memory_error", "host", "Python", r"(?:builtins\.)?memoryerror", line_start=True, event="memory_error"),
    form(
        "shell.killed",
        "killed",
        "the shell",
        r"(?:[^\n]{0,60}?line \d{1,6}: ?)?\d{3,9} killed (?=[a-z./~])",
        line_start=True,
        event="launcher",
        weak=True,
    ),
    form("shell.bus_error", "host", "the shell", r"bus error \(core dumped\)", event="shm", weak=True),
    form(
        "shell.killed_job",
        "killed",
        "the shell",
        r"\[\d{1,3}\] ?[+-]? ?\d{2,9} killed ",
        line_start=True,
        event="launcher",
        weak=True,
    ),
    form("shell.killed_zsh", "killed", "the shell", r"zsh: killed", line_start=True, event="launcher", weak=True),
    form(
        "jupyter.died",
        "killed",
        "Jupyter",
        r"the kernel (?:appears to have died|crashed while executing)|kernel died,? restarting",
        weak=True,
    ),
    form("shell.killed_alone", "killed", "the shell", r"killed(?:: ?9)?", whole_line=True, event="launcher", weak=True),
)
