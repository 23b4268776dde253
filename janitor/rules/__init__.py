"""The rules for deletions and inversions: pure functions without I/O."""
