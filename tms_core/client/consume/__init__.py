"""Reading a topic continuously."""

from __future__ import annotations
