"""The REST routes: topics, publishing, polling, producers and groups."""

from __future__ import annotations
