"""Run the matrix of versions of TRL; ``cuda``: of CUDA builds of torch."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["cuda"]:
        from benchmarks.versions.cuda import main as cuda

        sys.exit(cuda(sys.argv[2:]))
    from benchmarks.versions.matrix import main

    main()
