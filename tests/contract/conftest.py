"""Fixtures of the contract tests, which run against every store."""

from __future__ import annotations

from tests.hbase.conftest import hbase, hbase_tables

__all__ = ["hbase", "hbase_tables"]
