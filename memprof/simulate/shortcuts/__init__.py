"""Leave out work that repeats: each shortcut can be switched off, and equals the plain path to the byte.

The simulator asks for one by name (:mod:`memprof.simulate.plain`) and runs without all of them.
"""
