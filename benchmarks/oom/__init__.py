"""Score ``memprof oom`` on real texts, and table the forms it reads: ``python -m benchmarks.oom COMMAND``."""
