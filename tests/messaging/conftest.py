"""Fixtures of a kit on every store without a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.messaging import MAKERS, Kit


@pytest.fixture(params=sorted(MAKERS))
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kit]:
    made = MAKERS[request.param](tmp_path)
    made.create("orders")
    yield made
    made.close()
