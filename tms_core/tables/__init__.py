"""One interface to the three tables, and the stores that implement it."""
