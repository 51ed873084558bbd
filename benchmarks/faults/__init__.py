"""Break memprof on purpose: raise exceptions in its own functions while a run goes on."""
