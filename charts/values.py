"""The values that the chart has by default, and what the comments beside them say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).with_name("tms-janitor")


def defaults() -> Any:
    """``values.yaml``."""
    return yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


def comments() -> dict[str, str]:
    """What ``values.yaml`` says of each value, by its path: the comment ``# -- …`` above it."""
    found, said, path = {}, "", list[str]()
    for line in (CHART / "values.yaml").read_text(encoding="utf-8").splitlines():
        if match := re.match(r" *# -- (.+)", line):
            said = match[1]
        elif match := re.match(r"( *)([\w.-]+):", line):
            path = [*path[: len(match[1]) // 2], match[2]]
            if said:
                found[".".join(path)] = said
            said = ""
    return found
