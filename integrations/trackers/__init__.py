"""Memory in the trackers a trainer reports to."""
