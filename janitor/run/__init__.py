"""One run from its preparation to its conclusion, and queries that change nothing."""
