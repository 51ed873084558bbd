"""Analyse a run and describe it as plain data; :func:`memprof.analysis.analysis.analyze` is the way in."""
