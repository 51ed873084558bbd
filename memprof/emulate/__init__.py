"""Run CUDA torch on a card that is not there: its own allocator, on host memory that is counted.

``native/`` holds the libraries' sources; :mod:`memprof.emulate.build` compiles them for an installed torch,
:mod:`memprof.emulate.launch` starts a command on them.
"""
