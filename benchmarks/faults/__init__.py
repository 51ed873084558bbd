"""Break memprof on purpose: exceptions in its own functions while a run goes on, and inputs nobody here wrote."""
