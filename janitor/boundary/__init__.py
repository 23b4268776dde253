"""The prune boundary: covered intervals, and the boundary that they prove."""
