"""Consumers and consumer groups: positions, claims and lag."""

from __future__ import annotations
