"""Transactions of an application: messages, participants and partitions that commit together."""

from __future__ import annotations
