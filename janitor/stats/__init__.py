"""Background counts: sizes of topics, and lags of consumers."""
