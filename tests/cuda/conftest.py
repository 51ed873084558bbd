"""Skip this folder where the emulated device was not set up."""

from __future__ import annotations

import os

import pytest

from tests.cuda.table import pytest_terminal_summary, row

__all__ = ["pytest_terminal_summary", "row"]


@pytest.fixture(scope="session", autouse=True)
def emulated_device() -> None:
    if "FAKECUDA_HOME" not in os.environ:
        pytest.skip("the emulated CUDA device is not set up")
