"""Consumers: their positions, and how far behind they are."""
