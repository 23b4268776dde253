"""The HTTP listener of the server and of the status page."""
