"""Quotas of principals, and delays after failed attempts, with a manual clock."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.builders import NOW_MS
from tests.server.client import Client, encode_for_json
from tests.server.conftest import serving
from tests.server.identities import PrincipalClient, gate_of
from tests.support import PATIENCE_SECONDS, wait_until
from tms_core.client.protocol import calls
from tms_core.clock import ManualClock, SystemClock
from tms_core.errors import QuotaExceeded
from tms_core.messaging.groups.claims import GroupBatch
from tms_core.server.auth.quotas import MAX_PRINCIPALS, Quotas
from tms_core.server.auth.tokens import new_token, token_line
from tms_core.settings.models import AuthQuota
from tms_core.topic import TopicId
from tms_core.transaction.model import TX_PER_MS, Transaction
from tms_core.web.failed_attempts import FREE_ATTEMPTS

TOPICS = "/v1/namespaces/default/topics"
#: More calls than threads of the server.
SLOW_CALLS = 12
#: The body of a group's poll.
GROUP_POLL = json.dumps({"transaction": encode_for_json(Transaction(1, 1, 1))}).encode()


def quota(principal: str, **limits: int) -> AuthQuota:
    return AuthQuota.model_validate({"principal": principal, **limits})


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


# --- counting --------------------------------------------------------------------------------------------------------


def test_requests_in_flight_above_the_quota_are_rejected_until_one_ends(clock: ManualClock) -> None:
    quotas = Quotas([quota("*", requests=2)], clock)
    with quotas.request("ada"):
        with quotas.request("ada"), pytest.raises(QuotaExceeded, match="2 requests"), quotas.request("ada"):
            raise AssertionError
        with quotas.request("ada"), quotas.request("ben"):
            pass


def test_quota_of_a_principal_replaces_the_default_quota(clock: ManualClock) -> None:
    quotas = Quotas([quota("*", requests=1), quota("ada", topics=3)], clock)
    assert (quotas.of("ada"), quotas.of("ben")) == (quota("ada", topics=3), quota("*", requests=1))


def test_bytes_above_the_rate_delay_the_next_requests_and_nothing_is_saved_up(clock: ManualClock) -> None:
    quotas = Quotas([quota("*", bytes_per_second=100)], clock)
    clock.advance(60_000)
    with quotas.request("ada"):
        quotas.spend("ada", 350)
    with pytest.raises(QuotaExceeded, match="100 bytes") as refused, quotas.request("ada"):
        raise AssertionError
    assert refused.value.retry_after_seconds == 2.5
    clock.advance(2_501)
    with quotas.request("ada"):
        pass


def test_quotas_of_many_principals_take_bounded_memory(clock: ManualClock) -> None:
    quotas = Quotas([quota("*", requests=1)], clock)
    with quotas.request("held"):
        for number in range(MAX_PRINCIPALS + 100):
            with quotas.request(str(number)):
                pass
        assert len(quotas._uses) <= MAX_PRINCIPALS
        with pytest.raises(QuotaExceeded), quotas.request("held"):
            raise AssertionError


# --- HTTP ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clients(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[PrincipalClient]:
    tokens = {name: new_token() for name in ("ada", "ben")}
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text("".join(f"{token_line(name, token)}\n" for name, token in tokens.items()))
    every = {"topics": ["default:*"], "can": ["admin", "publish", "consume"]}
    rules: list[dict[str, Any]] = [
        {"principal": name, **every, "consumers": [f"{name}-*"], "producers": [f"{name}-*"]} for name in tokens
    ]
    quotas = getattr(request, "param", [])
    gate = gate_of(clock, patient=False, kind="tokens", tokens_file=file, rules=rules, quotas=quotas)
    with serving(gate=gate) as server, Client(server.port) as client:
        server.service.create_topic(TopicId("default", "t"))
        yield PrincipalClient(server, client, tokens, TOPICS)


def test_tenant_cannot_touch_the_consumers_and_producers_of_another(clients: PrincipalClient) -> None:
    position = {"position": "0" * 40}
    instance = {"instance": "00000000-0000-0000-0000-000000000001"}
    for who, status in (("ada", 200), ("ben", 403)):
        assert clients.ask(who, "PUT", "/t/consumers/ada-c", position).status == status
        assert clients.ask(who, "GET", "/t/consumers/ada-c").status == status
        assert clients.ask(who, "POST", "/t/producers/ada-p", instance).status == status
        named = {"x_tms_producer": "default:t/ada-p", "x_tms_generation": "1", "x_tms_sequence": "1"}
        assert clients.ask(who, "POST", "/t/publish", {"messages": ["a"]}, **named).status == (
            409 if status == 200 else 403
        )
    refused = clients.ask("ben", "DELETE", "/t/consumers/ada-c")
    assert (refused.status, "ada-c" in refused.text) == (403, True)
    assert clients.ask("ben", "DELETE", "/t/producers/ada-p").status == 403
    assert clients.ask("ben", "POST", "/t/consumers/ada-c/rollback", {}).status == 403
    assert clients.ask("ben", "POST", "/t/publish", {"messages": ["b"]}).status == 200
    assert clients.ask("ada", "DELETE", "/t/consumers/ada-c").status == 200


def test_list_of_producers_hides_the_transactions_of_others(clients: PrincipalClient) -> None:
    instance = {"instance": "00000000-0000-0000-0000-000000000001"}
    generation = clients.ask("ada", "POST", "/t/producers/ada-p", instance).json["generation"]
    named = {"x_tms_producer": "default:t/ada-p", "x_tms_generation": generation, "x_tms_sequence": "1"}
    pointer = str(SystemClock().now_ms() * TX_PER_MS)
    body = {"messages": ["a"], "transactionWritePointer": pointer}
    assert clients.ask("ada", "POST", "/t/publish", body, **named, x_tms_label="bill").status == 200
    shown = {who: clients.ask(who, "GET", "/t/producers").json for who in ("ada", "ben")}
    assert [one["open"] for one in shown["ada"]] == [[{"transaction": pointer, "label": "bill"}]]
    assert [(one["name"], one["open"]) for one in shown["ben"]] == [("ada-p", [])]
    newer = {"instance": "00000000-0000-0000-0000-000000000002", "ended": {pointer: "committed"}}
    assert clients.ask("ada", "POST", "/t/producers/ada-p", newer).status == 200
    [ada], [ben] = (clients.ask(who, "GET", "/t/producers").json for who in ("ada", "ben"))
    assert (ada["former"]["transaction"], ben["former"]) == (pointer, None)


@pytest.mark.parametrize("clients", [[{"principal": "ada", "topics": 3}]], indirect=True)
def test_topics_above_the_quota_are_rejected_before_any_is_created(clients: PrincipalClient) -> None:
    refused = clients.ask("ada", "PUT", "/u", {"partitions": "2"})
    assert (refused.status, refused.headers["retry-after"]) == (429, "60")
    assert clients.ask("ada", "GET", "").json == ["t"]
    assert clients.ask("ada", "PUT", "/u", {"partitions": "1"}).status == 200
    assert clients.ask("ada", "PUT", "/v").status == 429
    assert clients.ask("ben", "PUT", "/v").status == 200


@pytest.mark.parametrize("clients", [[{"principal": "ada", "bytes_per_second": 1000}]], indirect=True)
def test_bytes_above_the_quota_are_429_with_retry_after(clients: PrincipalClient, clock: ManualClock) -> None:
    assert clients.ask("ada", "POST", "/t/publish", {"messages": ["x" * 4000]}).status == 200
    refused = clients.ask("ada", "POST", "/t/poll")
    assert refused.status == 429
    assert 3 <= int(refused.headers["retry-after"]) <= 4
    assert clients.ask("ben", "POST", "/t/poll").status == 200
    with pytest.raises(QuotaExceeded) as raised:
        calls.check(calls.poll("default:t", None, None, None, inclusive=True), 429, b"no", refused.headers)
    assert raised.value.retry_after_seconds == float(refused.headers["retry-after"])
    clock.advance(10_000)
    assert clients.ask("ada", "POST", "/t/poll").status == 200


@pytest.mark.parametrize("clients", [[{"principal": "ada", "bytes_per_second": 10_000}]], indirect=True)
def test_bytes_of_packed_bodies_count_as_they_are_unpacked(clients: PrincipalClient, clock: ManualClock) -> None:
    body = json.dumps({"messages": ["x" * 20_000]}).encode()
    known = clients.headers("ada")
    packed = gzip.compress(body)
    assert len(packed) < 1000
    assert clients.client.ask("POST", f"{TOPICS}/t/publish", packed, **known, content_encoding="gzip").status == 200
    assert clients.ask("ada", "POST", "/t/poll").status == 429
    clock.advance(60_000)
    assert clients.client.ask("POST", f"{TOPICS}/t/poll", b"{}", **known, accept_encoding="gzip").status == 200
    assert clients.ask("ada", "POST", "/t/poll").status == 429


@pytest.mark.parametrize("clients", [[{"principal": "ada", "topics": 3}]], indirect=True)
def test_topics_made_at_the_same_time_stay_within_the_quota(clients: PrincipalClient) -> None:
    def make(number: int) -> int:
        with Client(clients.client.socket.getpeername()[1]) as client:
            known = clients.headers("ada")
            return client.ask("PUT", f"{TOPICS}/n{number}", b"{}", **known).status

    with ThreadPoolExecutor(8) as threads:
        statuses = list(threads.map(make, range(24)))
    assert sorted(statuses) == [200] * 2 + [429] * 22
    assert len(clients.ask("ada", "GET", "").json) == 3


@pytest.mark.parametrize(
    ("method", "path"), [("topic", "/{}"), ("topics", ""), ("count_ages", "/{}/ages?olderThanSeconds=1")]
)
def test_slow_calls_of_one_principal_do_not_delay_another(
    clients: PrincipalClient, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    service, sent, released = clients.server.service, Event(), Event()
    service.create_topic(TopicId("default", "u"))
    call = getattr(service, method)

    def wait_then_call(*arguments: Any) -> Any:
        if not sent.is_set():
            assert released.wait(PATIENCE_SECONDS)
        return call(*arguments)

    monkeypatch.setattr(service, method, wait_then_call)
    token = f"Bearer {clients.tokens['ada']}"
    with ExitStack() as stack:
        stack.callback(released.set)
        waiting = [stack.enter_context(Client(clients.server.port)) for _ in range(SLOW_CALLS)]
        for client in waiting:
            client.send("GET", f"{TOPICS}{path.format('t')}", authorization=token)
        # The server has read the requests before it responds to this one.
        assert clients.client.ask("GET", "/ping").status == 200
        sent.set()
        assert clients.ask("ben", "GET", path.format("u")).status == 200
        released.set()
        assert [client.answer().status for client in waiting] == [200] * SLOW_CALLS


def test_group_polls_that_wait_for_their_turn_hold_no_memory(
    clients: PrincipalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, memory = Event(), clients.server.context.memory

    def wait_then_answer(*_: object) -> GroupBatch:
        assert released.wait(PATIENCE_SECONDS)
        return GroupBatch([])

    monkeypatch.setattr(clients.server.service.groups, "poll", wait_then_answer)
    known = clients.headers("ada")
    with ExitStack() as stack:
        stack.callback(released.set)
        waiting = [stack.enter_context(Client(clients.server.port)) for _ in range(SLOW_CALLS)]
        used = 0
        for client in waiting:
            client.send("POST", f"{TOPICS}/t/consumers/ada-c/poll", GROUP_POLL, **known)
            wait_until(lambda: memory.used_bytes > 0)
            used = used or memory.used_bytes
        # The server has read the requests before it responds to this one.
        assert clients.client.ask("GET", "/ping").status == 200
        assert (memory.used_bytes, memory.waiting) == (2 * used, 0)
        released.set()
        assert [client.answer().status for client in waiting] == [200] * SLOW_CALLS


def test_group_polls_that_wait_for_memory_leave_the_threads_to_plain_polls(
    clients: PrincipalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, memory, released = clients.server.service, clients.server.context.memory, Event()
    begin_fetch = service.begin_fetch

    def wait_then_call(*arguments: Any) -> Any:
        assert released.wait(PATIENCE_SECONDS)
        return begin_fetch(*arguments)

    monkeypatch.setattr(service, "begin_fetch", wait_then_call)
    monkeypatch.setattr(service.groups, "poll", lambda *_: GroupBatch([]))
    known = clients.headers("ada")
    with ExitStack() as stack:
        stack.callback(released.set)
        # Plain polls use both threads of the principal. Polls of a group wait, then plain polls that have memory.
        waiting = [stack.enter_context(Client(clients.server.port)) for _ in range(6)]
        for client, path in zip(waiting, ["poll"] * 2 + ["consumers/ada-c/poll"] * 2 + ["poll"] * 2, strict=True):
            client.send("POST", f"{TOPICS}/t/{path}", GROUP_POLL, **known)
            wait_until(lambda: memory.used_bytes > 0)
            if client is waiting[0]:
                memory.limit_bytes = 4 * memory.used_bytes
            assert clients.client.ask("GET", "/ping").status == 200
        wait_until(lambda: memory.used_bytes == memory.limit_bytes)
        released.set()
        assert [client.answer().status for client in waiting] == [200] * 6


def test_failed_attempts_wait_and_good_tokens_do_not(clients: PrincipalClient, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("tms_core.web.failed_attempts.asyncio.sleep", sleep)
    for _ in range(FREE_ATTEMPTS + 2):
        assert clients.ask(new_token(), "GET", "").status == 401
    assert slept == [0.5, 1.0]
    assert clients.ask("ada", "GET", "").status == 200
    assert clients.client.ask("GET", "/nothing").status == 401
    assert slept == [0.5, 1.0, 1.5]
