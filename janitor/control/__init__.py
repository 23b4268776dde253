"""The unix socket through which commands call the process that holds a store: HTTP with typed JSON values."""
