"""The write path: from a queued request to rows in the message and payload tables."""

from __future__ import annotations
