"""Topics in the metadata table, and the partitions and routes that a topic may have."""

from __future__ import annotations
