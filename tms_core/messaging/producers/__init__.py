"""Producers: instances, their requests, and the rows that record both."""

from __future__ import annotations
