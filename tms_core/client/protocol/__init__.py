"""Requests to a server and their responses, without and with I/O."""

from __future__ import annotations
