"""``python -m janitor`` is ``janitor``."""

from __future__ import annotations

from janitor.cli.main import main

main()
