"""Apache Tephra's transactions: visibility, snapshots and their sources, logs, the manager."""
