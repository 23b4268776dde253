"""Queries about single rows: their contents, and the reasons why a message still exists."""
