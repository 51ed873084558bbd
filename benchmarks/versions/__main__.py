"""Run the matrix of versions."""

from __future__ import annotations

from benchmarks.versions.matrix import main

if __name__ == "__main__":
    main()
