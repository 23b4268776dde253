"""Request and response bodies in both content types, Avro and JSON."""

from __future__ import annotations
