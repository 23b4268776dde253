"""The interface of CDAP's three tables, and the stores that implement it."""
