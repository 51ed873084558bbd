"""Fixtures every test folder shares."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real snapshots beside the checkout; tests that need it skip where it is absent."""
    folder = Path(__file__).resolve().parents[1].parent / "shared"
    if not (folder / "snapshots").is_dir():
        pytest.skip("the folder of real snapshots (../shared) is not here")
    return folder
