"""The law: deletions and inversions. Pure functions, no input or output."""
