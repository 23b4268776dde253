"""Consumers: positions, claims of consumer groups, lag, and retention of processed messages."""
