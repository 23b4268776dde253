"""``/openapi.json``: every response to generated requests conforms to it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2
import pytest
import schemathesis
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import DAY, NOW_MS
from tests.server.client import AVRO, Client, TopicClient
from tests.server.conftest import Serving, serving
from tests.server.test_groups import GroupClient
from tms_core.clock import ManualClock
from tms_core.server.rest.openapi import openapi
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage

DOCUMENT = openapi()
TOPIC = "/v1/namespaces/{namespace}/topics/{topic}"
CALLS = [
    (method, path)
    for path, item in DOCUMENT["paths"].items()
    for method in item
    if method != "parameters" and path.startswith("/v1")
]
#: Values that are valid for some fields, and values that are valid for none.
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 0, 1, -1, 2**31, 2**63, -(2**63), 1.5, "", "1", "-1", "a", "0" * 40, "AAAA", [], ["a"], {}]
)
VALUES = st.recursive(ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
SHAPES = {
    "id": VALUES,
    "timeMs": VALUES,
    "base64": VALUES,
    "startTimestamp": VALUES,
    "startSequenceId": VALUES,
    "endTimestamp": VALUES,
    "endSequenceId": VALUES,
}
INNER = st.fixed_dictionaries({}, optional=SHAPES)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(VALUES | INNER, max_size=3) | VALUES,
        "transactionWritePointer": VALUES,
        "ttlSeconds": VALUES,
        "startFrom": INNER | VALUES,
        "inclusive": VALUES,
        "limit": VALUES,
        "transaction": VALUES,
        "rollbackRange": INNER | VALUES,
        "ttl": VALUES,
        "generation": VALUES,
        "position": VALUES,
    },
)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as running:
        with Client(running.port) as client:
            client.ask("PUT", "/v1/namespaces/default/topics/there")
        yield running


@given(st.sampled_from(CALLS), st.sampled_from(["there", "gone", "a.b"]), BODIES | VALUES)
def test_any_json_gets_a_documented_answer(server: Serving, call: tuple[str, str], topic: str, body: Any) -> None:
    method, path = call
    with Client(server.port) as client:
        url = path.format(namespace="default", topic=topic, name="billing")
        answer = client.ask(method.upper(), url, json.dumps(body).encode(), content_type="application/json")
        client.ask("PUT", "/v1/namespaces/default/topics/there")
    promised = DOCUMENT["paths"][path][method]["responses"]
    assert str(answer.status) in promised
    if answer.status == 500:
        assert answer.headers["x-tms-error"] == "TMS-TRANSACTION-EXPIRED"
    if answer.status != 200:
        assert answer.headers["content-type"] in {f"{kind}; charset=utf-8" for kind in promised["400"]["content"]}
    elif answer.body:
        assert answer.headers["content-type"] in promised["200"]["content"]


def test_document_tried_by_schemathesis_promises_every_answer(server: Serving, tmp_path: Path) -> None:
    # Polls do not wait, because each wait takes up to a minute.
    server.context.waiting.close()
    # The document includes 500, with which CDAP rejects a transaction past its lifetime.
    checks = "status_code_conformance,unsupported_method,use_after_free"
    done = subprocess.run(
        [
            *(Path(sys.executable).with_name("schemathesis"), "run", f"http://127.0.0.1:{server.port}/openapi.json"),
            *("--checks", checks, "--phases", "examples,coverage,fuzzing", "--max-examples", "10", "--seed", "1"),
            *("--suppress-health-check", "all", "--warnings", "off", "--no-color"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert f"Tested: {len(CALLS) + 2}" in done.stdout


def test_responses_about_a_used_topic_match_their_schemas() -> None:
    described, clock = schemathesis.openapi.from_dict(DOCUMENT), ManualClock(NOW_MS, monotonic_ms=DAY)
    with (
        TransactionManager(MemoryStorage(), clock) as manager,
        serving(clock=clock, transactions=manager) as running,
        Client(running.port) as client,
    ):
        group = GroupClient(TopicClient(client, "orders").create(), manager, running.service)
        working, failing = manager.start_short(), manager.start_short()
        assert all(group.poll(tx, 1, x_tms_order="none").json for tx in (working, failing))
        group.ask("rollback", {"transactionWritePointer": str(failing.transaction_id)})
        generation = group.topic.post("producers/billing", {"instance": str(UUID(int=1))}).json["generation"]
        sent = {"x_tms_producer": "default:orders/billing", "x_tms_generation": generation, "x_tms_sequence": "1"}
        body = {"transactionWritePointer": str(working.transaction_id), "messages": ["a"]}
        assert group.topic.post("publish", body, x_tms_label="a", **sent).status == 200
        for end in ("", "/ages", "/consumers", "/consumers/{name}", "/producers", "/producers/{name}"):
            url = f"http://127.0.0.1:{running.port}{group.topic.path}{end.format(name='billing')}?olderThanSeconds=1"
            described[f"{TOPIC}{end}"]["GET"].validate_response(httpx2.get(url))
        assert {"claims", "failed"} <= group.shown().keys()
        manager.abort(failing)
        for verb in ("publish", "store"):
            answer = group.topic.post(verb, body | {"transactionWritePointer": str(failing.transaction_id)})
            assert str(answer.status) in DOCUMENT["paths"][f"{TOPIC}/{verb}"]["post"]["responses"]


def test_document_has_the_headers_types_and_waits_that_routes_accept(server: Serving) -> None:
    server.context.waiting.close()
    longest = DOCUMENT["components"]["schemas"]["ConsumeRequest"]["properties"]["waitSeconds"]["maximum"]
    with Client(server.port) as client:
        topic = TopicClient(client, "there")
        assert [topic.post("poll", {"waitSeconds": longest + more}).status for more in (0, 1)] == [200, 400]
        for path, operation in [(path, item["post"]) for path, item in DOCUMENT["paths"].items() if "post" in item]:
            verb = path.removeprefix(f"{TOPIC}/").format(name="billing")
            is_json = "JSON" in topic.post(verb, b"", content_type=AVRO).text
            assert (AVRO in operation["requestBody"]["content"]) != is_json
            alone = topic.post(verb, {"transactionWritePointer": "1"}, x_tms_label="a").text
            headers = {header["name"] for header in operation.get("parameters", [])}
            assert ("X-TMS-Label" in headers) == ("X-TMS-Producer" in alone)


def test_every_path_in_the_document_has_its_parameters() -> None:
    for path, item in DOCUMENT["paths"].items():
        assert re.findall(r"{(\w+)}", path) == [parameter["name"] for parameter in item.get("parameters", [])]


def test_every_reference_in_the_document_leads_somewhere() -> None:
    text = json.dumps(DOCUMENT)
    for name in {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}:
        assert name in DOCUMENT["components"]["schemas"]
