"""Apache Tephra's transactions: visibility, encodings, snapshots and their sources, the manager and its service."""
