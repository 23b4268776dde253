"""The HTTP server for browsers, probes and Prometheus; it only shows and changes nothing."""

from __future__ import annotations

from janitor.http.app import StatusViews, make_app
from janitor.http.server import HttpServer

__all__ = ["HttpServer", "StatusViews", "make_app"]
