"""The read-only HTTP server for browsers, probes and Prometheus."""
