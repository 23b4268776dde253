"""The data source ``tms``: the rows of a table as a DataFrame."""

from __future__ import annotations

from janitor.spark.source.source import register

__all__ = ["register"]
