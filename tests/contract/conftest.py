"""What the stores under contract stand on."""

from __future__ import annotations

from tests.hbase.conftest import hbase, hbase_tables

__all__ = ["hbase", "hbase_tables"]
