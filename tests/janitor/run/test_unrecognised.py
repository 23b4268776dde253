"""Rows that are nobody's are left alone, counted, and named in the log once."""

from __future__ import annotations

import logging

import pytest

from janitor.report import NAMED_KEYS
from tests.builders import NOW_MS, Call, Rig, janitor, topic, unknown_topic, watch
from tms_core.tables.base import MessageValue
from tms_core.tables.memory import MemoryStore


def rig(unrecognised: int) -> Rig:
    store = MemoryStore()
    unknown_topic(store, "default:lost").plain(1, NOW_MS)
    store.message.put([(b"#%04d" % number, MessageValue(None, b"?")) for number in range(unrecognised)])
    return janitor(store)


def named(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("left alone")]


def test_given_a_foreign_row_and_an_unknown_topic_when_run_twice_then_each_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    site = rig(1)
    site.engine.run_once(adopt=True)
    assert named(caplog) == [
        "left alone: a row of the message table with an unrecognised key: 2330303030",
        "left alone: rows of topic default:lost, which has no metadata that can be read",
    ]
    site.engine.preview()
    assert len(named(caplog)) == 2


def test_given_very_many_foreign_rows_when_run_then_all_are_counted_and_the_first_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    report = rig(NAMED_KEYS + 5).engine.run_once(adopt=True)
    assert report.to_json()["totals"]["kept"] == {
        "unknown_topic": 2,
        "newer_generation": 0,
        "foreign": NAMED_KEYS + 5,
        "undecided": 0,
        "referenced": 0,
        "held": 0,
    }
    assert len(named(caplog)) == NAMED_KEYS + 1


def test_given_a_topic_that_is_made_while_a_run_is_under_way_then_it_is_not_said_to_be_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    site = rig(0)

    def make(call: Call) -> None:
        if call.name.startswith("message.") and site.store.metadata.get(b"default:new:") is None:
            topic(site.store, "default:new", ttl_seconds=60).plain(NOW_MS)

    watch(site.store, before=make)
    site.engine.run_once(adopt=True)
    lost = "left alone: rows of topic default:lost, which has no metadata that can be read"
    assert named(caplog) == [lost]
