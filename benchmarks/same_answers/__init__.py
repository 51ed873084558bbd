"""Keep the answers of two versions of memprof, and say where they differ."""
