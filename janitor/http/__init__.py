"""The HTTP server for browsers, probes and Prometheus; it only shows and changes nothing."""
