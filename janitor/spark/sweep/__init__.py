"""A sweep whose scans run as tasks of Spark."""
