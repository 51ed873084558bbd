"""Leave out work that repeats: each shortcut can be switched off, and equals the plain path to the byte.

The simulator looks a shortcut up by its name (:mod:`memprof.simulate.shortcut_switches`), and runs without any of
them, too.
"""
