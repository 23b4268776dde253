"""What is counted in the background: sizes of topics, lag of consumers."""
