"""The state in an SQLite file, in a separate folder."""
