"""``docs/reference/rest.md``: examples and tables agree with the code."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.builders import NOW_MS
from tests.server.client import Client
from tests.test_docs import tables
from tms_core.clock import ManualClock
from tms_core.messaging.model import FetchedMessage, FetchRequest, RollbackRange
from tms_core.rowkey import MessageId
from tms_core.server.codec.avro import AvroCodec
from tms_core.server.managing import TransactionMetrics
from tms_core.server.metrics import LeadershipMetrics
from tms_core.server.rest.app import routes
from tms_core.server.rest.openapi import openapi
from tms_core.tables.side import MemorySide
from tms_core.topic import INT_MAX

PAGE = "\n".join(
    (Path(__file__).parents[2] / "docs/reference" / name).read_text(encoding="utf-8")
    for name in ("rest.md", "rest-consumers.md")
)
T, W = 1_500_000_000_000, 1_500_000_000_000_000_007
ID = MessageId(T, 0)
AVRO = AvroCodec()

READ = {
    "PublishRequest outside a transaction: `a`, `bc`": (None, [b"a", b"bc"], None),
    "PublishRequest in W: `a`": (W, [b"a"], None),
    "PublishRequest in W, no message: publishes what was stored": (W, [], None),
    "PublishResponse: W, T, sequences 0 to 1": RollbackRange(W, T, 0, T, 1),
    "ConsumeRequest from the beginning, limit 2^31 − 1": FetchRequest(None, True, INT_MAX),
    "ConsumeRequest after the id, limit 10": FetchRequest(ID, False, 10),
    "ConsumeRequest from T on, limit 10": FetchRequest(T, True, 10),
}
WRITTEN = {"ConsumeResponse: the id, `hi`": [FetchedMessage(ID.pack(), b"hi")], "ConsumeResponse, nothing": []}


def examples() -> dict[str, bytes]:
    [rows] = [rows for head, *rows in tables(PAGE) if head == ["example", "bytes"]]
    return {name: bytes.fromhex(data.strip("`")) for name, data in rows}


def test_the_page_has_these_examples() -> None:
    assert examples().keys() == READ.keys() | WRITTEN.keys()


@pytest.mark.parametrize("name", READ)
def test_example_request_is_decoded_as_the_page_states(name: str) -> None:
    readers = {
        "PublishRequest": AVRO.read_publish,
        "PublishResponse": AVRO.read_rollback,
        "ConsumeRequest": AVRO.read_poll,
    }
    [read] = [reader for record, reader in readers.items() if name.startswith(record)]
    assert read(examples()[name]) == READ[name]


@pytest.mark.parametrize("name", WRITTEN)
def test_example_response_is_encoded_as_the_page_states(name: str) -> None:
    assert b"".join(AVRO.write_messages([WRITTEN[name]])) == examples()[name]


def test_the_table_of_routes_has_every_route(client: Client) -> None:
    document = client.ask("GET", "/openapi.json").json
    prefix = "/v1/namespaces/{namespace}"
    known = {
        (method.upper(), path.removeprefix(prefix))
        for path, item in document["paths"].items()
        for method in item
        if method != "parameters"
    }
    [rows] = [rows for head, *rows in tables(PAGE) if head[0] == "method and path"]
    assert {tuple(row[0].replace("`", "").split(" ")) for row in rows} == known


def test_the_table_of_codes_has_every_code_of_the_document() -> None:
    paths = openapi(secured=True)["paths"].values()
    used = {code for item in paths for call in item.values() if "responses" in call for code in call["responses"]}
    [rows] = [rows for head, *rows in tables(PAGE) if head[0] == "code"]
    # 405, 408 and 431 are responses to requests that are not in the document, and 502 comes from a forwarding server.
    assert {row[0] for row in rows} == used - {"200"} | {"405", "408", "431", "502"}


def test_the_table_of_metrics_has_every_metric(client: Client) -> None:
    client.ask("GET", "/ping")
    shown = set(re.findall(r"^# TYPE (\w+)", client.ask("GET", "/metrics").text, flags=re.MULTILINE))
    leads = LeadershipMetrics(Mock(leaderships=[Mock(leads=True, fence=1)], led=1))
    late = TransactionMetrics(Mock(is_running=False), MemorySide(), ManualClock(NOW_MS))
    shown |= {metric.name for collector in (leads, late) for metric in collector.collect()}
    [rows] = [rows for head, *rows in tables(PAGE) if head[0] == "metric"]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert named == {name for name in shown if not name.endswith("_created")}


def test_the_labels_of_the_metric_of_requests_name_every_route() -> None:
    [row] = [row for _, *rows in tables(PAGE) for row in rows if row[0] == "`tms_requests_total`"]
    labels = set(re.findall(r"`(\w+)`", row[2])) - {"route"}
    assert labels == {route.name for route in routes(Mock())} | {"forwarded", "none"}
