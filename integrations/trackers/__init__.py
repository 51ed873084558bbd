"""Log memory in the trackers a trainer reports to."""
