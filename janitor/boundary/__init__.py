"""The prune boundary: what has been covered, and the claim that follows from it."""
