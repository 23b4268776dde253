"""The chart's default values, and their comments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).with_name("tms-janitor")


def defaults() -> Any:
    """Return the contents of ``values.yaml``."""
    return yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


def comments() -> dict[str, str]:
    """Return the comments of values in ``values.yaml``, by path: the line ``# -- …`` above a value."""
    found, comment, path = {}, "", list[str]()
    for line in (CHART / "values.yaml").read_text(encoding="utf-8").splitlines():
        if match := re.match(r" *# -- (.+)", line):
            comment = match[1]
        elif match := re.match(r"( *)([\w.-]+):", line):
            path = [*path[: len(match[1]) // 2], match[2]]
            if comment:
                found[".".join(path)] = comment
            comment = ""
    return found
