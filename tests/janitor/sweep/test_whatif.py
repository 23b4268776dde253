"""Policies that are not in force, as they are typed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from janitor.run.plan_file import WhatIf, changed, supposed
from janitor.sweep.run import parse_or_none
from tests.builders import topic
from tms_core.errors import ConfigurationError
from tms_core.tables.base import Store
from tms_core.tables.memory import MemoryStore
from tms_core.tables.read_only import read_only
from tms_core.topic import TopicId, TopicMetadata

ORDERS = TopicMetadata(TopicId("default", "orders"), 1, 60)


@pytest.mark.parametrize(
    ("text", "ttl_seconds"),
    [
        ("ttl=3d,topic=default:*", 259_200),
        ("topic=default:orders, ttl=1d12h", 129_600),
        ("ttl=90m", 5_400),
        ("ttl=1d,topic=other:*", 60),
        ("ttl=1d;ttl=2s,topic=default:orders", 2),
        ("", 60),
    ],
)
def test_given_a_policy_when_read_then_topics_it_names_have_its_ttl(text: str, ttl_seconds: int) -> None:
    assert changed(ORDERS, WhatIf.parse(text)).ttl_seconds == ttl_seconds


@pytest.mark.parametrize(
    "text", ["ttl=3", "ttl=d", "topic=default:*", "ttl=1d,ttl=2d", "ttl=1d,topics=a:b", "ttl=1d,topic=orders", "ttl=0s"]
)
def test_given_no_policy_when_read_then_it_says_how_one_is_written(text: str) -> None:
    with pytest.raises(ConfigurationError):
        WhatIf.parse(text)


@pytest.mark.parametrize("face", [lambda store: store, read_only], ids=["a store", "a daemon's store"])
def test_supposed_changes_ttls_alone_and_writes_nothing(face: Callable[[MemoryStore], Store]) -> None:
    store = MemoryStore()
    topic(store, "default:orders", ttl_seconds=60)
    topic(store, "other:orders", ttl_seconds=60)
    store.metadata.compare_and_set(b"default:broken:", None, b"{")
    before = store.metadata.rows()
    then = supposed(face(store), WhatIf.parse("ttl=1d,topic=default:*"))
    ttls = {key: found.ttl_seconds for key, value in then.metadata.rows() if (found := parse_or_none(key, value))}
    assert ttls == {b"default:orders:": 86_400, b"other:orders:": 60}
    assert then.metadata.get(b"default:broken:") == b"{"
    assert then.metadata.get(b"default:orders:") == dict(then.metadata.rows())[b"default:orders:"]
    assert then.metadata.get(b"nothing:here:") is None
    assert store.metadata.rows() == before
    assert not hasattr(then.metadata, "compare_and_set")
