"""One run from its preparation to its conclusion, and the questions that a run answers."""
