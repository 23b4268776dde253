"""The deletion rules: deletions and inversions. Pure functions, no input or output."""
