"""Publishing in the background from a bounded buffer."""

from __future__ import annotations
