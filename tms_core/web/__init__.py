"""The HTTP listener that server and status page share."""
