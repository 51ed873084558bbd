"""Say what the counters of a run show of the host's memory."""
