"""Wrapped tables: they return the attributes of the wrapped table."""

from __future__ import annotations

import pytest

from tms_core.tables.memory import MemoryStore
from tms_core.tables.wrapped import Hook, WrappedMessageTable, WrappedPayloadTable


@pytest.mark.parametrize("beside", [True, False])
def test_wrapped_table_compacts_concurrently_if_its_table_does(beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    for table in (store.message, store.payload):
        monkeypatch.setattr(type(table), "can_compact_concurrently", beside)
    assert WrappedMessageTable(store.message, Hook()).can_compact_concurrently is beside
    assert WrappedPayloadTable(store.payload, Hook()).can_compact_concurrently is beside
