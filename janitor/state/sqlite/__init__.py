"""The state in a file of SQLite, beside the store."""
