"""The state in an SQLite file, in a folder of its own."""
