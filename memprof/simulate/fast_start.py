"""Make a process that does nothing but simulate start sooner: the command's, and a plan's workers.

Looking for garbage among what torch, transformers and TRL import is a fifth of the time to import them, and TRL imports
MLflow wherever it is installed, only to report to it.
"""

from __future__ import annotations

import gc
import os

#: transformers' own switch, which TRL follows.
NO_MLFLOW = "DISABLE_MLFLOW_INTEGRATION"


def take_process() -> None:
    """Pause the garbage collector for good, and let nothing be reported to MLflow.

    Only for a process of ours that simulates and ends. A simulation collects what the one before it left.
    """
    gc.disable()
    os.environ.setdefault(NO_MLFLOW, "TRUE")
