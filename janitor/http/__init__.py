"""The janitor's face to browsers, probes and Prometheus: it shows, and changes nothing."""

from __future__ import annotations

from janitor.http.app import Views, make_app
from janitor.http.server import HttpServer

__all__ = ["HttpServer", "Views", "make_app"]
