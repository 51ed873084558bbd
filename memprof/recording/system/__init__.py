"""Watch what surrounds torch while it records: the process, the device as NVML sees it, signals."""
