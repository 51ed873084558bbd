"""Ask what kind of device computes, and how much of its memory is free.

These are functions of a module so that a simulation can answer in the machine's place.
"""

from __future__ import annotations

import os

import torch


def device_kind(device: torch.device) -> str:
    """Name the kind of device: ``cuda``, ``cpu`` ..."""
    return device.type


def computes_values() -> bool:
    """Tell whether operators have results: an emulated GPU can be told to compute none."""
    return os.environ.get("MEMPROF_EMULATE_VALUES") != "0"


def free_bytes(device: torch.device) -> int:
    """Count what the process can still get: free on the device, and cached by torch without being used."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
