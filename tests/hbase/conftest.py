"""The HBase of a test run."""

from __future__ import annotations
