"""Topics in the metadata table, and the rules of partitions and routes."""

from __future__ import annotations
