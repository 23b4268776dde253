"""Wrapped tables answer for themselves what the wrapped table answers."""

from __future__ import annotations

import pytest

from tms_core.tables.memory import MemoryStore
from tms_core.tables.wrapped import Hook, WrappedMessageTable, WrappedPayloadTable


@pytest.mark.parametrize("beside", [True, False])
def test_wrapped_table_compacts_beside_if_its_table_does(beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    for table in (store.message, store.payload):
        monkeypatch.setattr(type(table), "compacts_beside", beside)
    assert WrappedMessageTable(store.message, Hook()).compacts_beside is beside
    assert WrappedPayloadTable(store.payload, Hook()).compacts_beside is beside
