"""The unix socket on which commands reach the process that holds a store."""

from __future__ import annotations

from janitor.control.audience import Audience
from janitor.control.client import Caller, RemoteEngine
from janitor.control.desk import Decider, Desk, Greeting, Views
from janitor.control.server import ControlServer

__all__ = ["Audience", "Caller", "ControlServer", "Decider", "Desk", "Greeting", "RemoteEngine", "Views"]
