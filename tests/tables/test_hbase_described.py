"""Table settings and regions that affect sweeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tms_core.tables.hbase.described import REQUIRED_SETTINGS, TableSettings

TABLE = TableSettings("ns:tms.message", [b"", b"\x01", b"\x02"], 3, REQUIRED_SETTINGS)


def test_required_or_missing_settings_are_not_unfavorable() -> None:
    assert TABLE.unfavorable == {}
    assert replace(TABLE, settings={}).unfavorable == {}
    assert replace(TABLE, settings={"READONLY": "FALSE", "KEEP_DELETED_CELLS": "false"}).unfavorable == {}


@pytest.mark.parametrize(
    ("setting", "value"),
    [("READONLY", "true"), ("TTL", "604800"), ("VERSIONS", "3"), ("MIN_VERSIONS", "1"), ("KEEP_DELETED_CELLS", "TTL")],
)
def test_setting_that_keeps_or_loses_rows_is_unfavorable(setting: str, value: str) -> None:
    assert replace(TABLE, settings={**REQUIRED_SETTINGS, setting: value}).unfavorable == {setting: value}


def test_salts_without_a_region_are_missing() -> None:
    assert TABLE.missing_starts == []
    assert replace(TABLE, starts=[b"", b"\x02"], buckets=4).missing_starts == [b"\x01", b"\x03"]
    assert replace(TABLE, buckets=2).missing_starts == []
    assert replace(TABLE, buckets=None, starts=[b""]).missing_starts == []
