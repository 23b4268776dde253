"""The unix socket on which commands reach the process that holds a store: HTTP, with values as JSON by their types."""
