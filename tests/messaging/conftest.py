"""A desk over every store that needs no server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.messaging.desk import MAKERS, Desk


@pytest.fixture(params=sorted(MAKERS))
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Desk]:
    made = MAKERS[request.param](tmp_path)
    made.create("orders")
    yield made
    made.close()
