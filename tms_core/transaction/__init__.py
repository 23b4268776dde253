"""Apache Tephra's transactions: visibility, snapshots, logs, and where they come from."""
