"""The server of the control socket: permissions, bad clients, and that clients do not delay the work."""

from __future__ import annotations

import http.client
import json
import logging
import os
import socket
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from janitor.control import api, wire
from janitor.control import server as server_module
from janitor.inspect.rows import Audit
from janitor.report import Observer
from janitor.rules.policy import Rule
from janitor.run import plan_file as plan
from janitor.state import values
from janitor.state.base import EVERYTHING
from tests.builders import Call, watch
from tests.janitor.control.conftest import SETTINGS, STORE, Client, ControlKit
from tests.support import raising, wait_until
from tms_core.errors import GuardTripped, StateError, StopRequested, StoreBusy, StoreError, TmsError
from tms_core.logs.loggers import AUDIT
from tms_core.topic import TopicId

ORDERS = TopicId("default", "orders")


def kind_of(answer: dict[str, Any]) -> str:
    return str(answer["error"]["kind"])


def test_socket_with_any_umask_is_accessible_only_by_its_owner(kit: ControlKit) -> None:
    previous = os.umask(0)
    try:
        kit.start()
    finally:
        os.umask(previous)
    assert stat.S_IMODE((kit.folder / "control.sock").stat().st_mode) == 0o600


def test_socket_of_a_dead_process_is_replaced(kit: ControlKit) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(kit.folder / "control.sock"))
    kit.start()
    assert kit.remote().process_identity.store == STORE


def test_socket_of_a_live_janitor_is_not_replaced(kit: ControlKit, tmp_path: Path) -> None:
    kit.start()
    second = ControlKit(tmp_path, kit.janitor, kit.observers)
    with pytest.raises(StoreBusy, match="Another janitor listens"):
        second.start()
    assert kit.remote().process_identity.store == STORE


def test_start_over_a_regular_file_raises_and_keeps_the_file(kit: ControlKit) -> None:
    path = kit.folder / "control.sock"
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(StoreError, match="is not a socket"):
        kit.start()
    assert path.read_text(encoding="utf-8") == "mine"


def test_start_in_a_missing_folder_raises_with_its_path(kit: ControlKit, tmp_path: Path) -> None:
    kit.folder = tmp_path / "missing"
    with pytest.raises(StoreError, match=r"missing/control\.sock .*No such file"):
        kit.start()


def test_stop_removes_the_socket_and_can_be_repeated(kit: ControlKit) -> None:
    server = kit.start()
    server.stop()
    assert not (kit.folder / "control.sock").exists()
    server.stop()


@pytest.mark.parametrize(("uid", "welcome"), [(4711, True), (0, True), (12345, False)])
def test_server_responds_only_to_the_owner_and_root(
    kit: ControlKit, monkeypatch: pytest.MonkeyPatch, uid: int, welcome: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(server_module, "peer_uid", lambda _: uid)
    kit.start()
    assert ("result" in kit.ask("hello")) is welcome


def test_peer_uid_of_a_connection_is_the_user_of_its_process() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert server_module.peer_uid(ours) == os.getuid()


GOOD = b'{"protocol": 2, "params": {}}'


@pytest.mark.parametrize(
    ("method", "body"),
    [
        ("verify", b"\x00\xff\xfe"),
        ("verify", b""),
        ("verify", b"[]"),
        ("verify", b"{}"),
        ("verify", b"[" * 100_000),
        ("verify", b'{"protocol": 2}'),
        ("verify", b'{"protocol": 2, "params": 5}'),
        ("__class__", GOOD),
        ("is_running", GOOD),
        ("run_once", GOOD),
        ("verify", b'{"protocol": 2, "params": {"self": 1}}'),
        ("inspect", b'{"protocol": 2, "params": {"table": "secrets", "patterns": [], "limit": 1}}'),
        ("inspect", b'{"protocol": 2, "params": {"table": "message", "patterns": [], "limit": "x"}}'),
        ("inspect", GOOD),
        ("apply", b'{"protocol": 2, "params": {"wanted": {}}}'),
    ],
)
def test_garbage_is_rejected_and_the_next_client_served(kit: ControlKit, method: str, body: bytes) -> None:
    kit.start()
    with kit.connect() as client:
        client.post(method, body)
        answer = client.read_message()
        assert kind_of(answer) == "TmsError"
        assert "is invalid" in answer["error"]["message"]
        assert client.line() == b""
    assert kit.remote().process_identity.settings == SETTINGS


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b'{"protocol": 1, "method": "hello", "params": {}}\n']
)
def test_invalid_request_is_rejected(kit: ControlKit, data: bytes) -> None:
    kit.start()
    with kit.connect() as client:
        client.send(data)
        assert client.response.status in (400, 404)
    assert kit.remote().process_identity.settings == SETTINGS


def test_request_above_the_size_limit_is_rejected(kit: ControlKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BYTES", 1000)
    kit.start()
    with Client(kit.folder) as client:
        client.post("verify", b"x" * 1001)
        assert client.response.status == 413
        assert "more than 1000 bytes" in json.dumps(client.read_message())


def test_response_above_the_size_limit_is_an_error(kit: ControlKit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.start()
    remote = kit.remote()
    monkeypatch.setattr(wire, "MAX_BYTES", 300)
    with pytest.raises(StoreError, match="exceed the limit"):
        remote.plan()


def test_request_of_another_protocol_version_is_rejected(kit: ControlKit) -> None:
    kit.start()
    with kit.connect() as client:
        client.post("hello", b'{"protocol": 99, "params": {}}')
        answer = client.read_message()
    assert kind_of(answer) == "StoreBusy"
    assert " 99" in answer["error"]["message"]


@pytest.mark.parametrize("data", [b"", b"POST /cont", b"POST /control/verify HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"])
def test_server_after_an_incomplete_request_serves_the_next_client(kit: ControlKit, data: bytes) -> None:
    kit.start()
    with kit.connect() as client:
        client.send(data)
    assert kit.remote().verify().cells == 0


def test_silent_client_is_disconnected(kit: ControlKit) -> None:
    kit.start(request_seconds=0.01)
    with kit.connect() as client:
        assert client.line() == b""


def test_client_above_the_limit_is_rejected(kit: ControlKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CLIENTS", 1)
    kit.audit = audit = EndlessAudit()
    kit.start()
    with kit.connect() as first, kit.connect() as second:
        first.ask("verify")
        assert audit.began.wait(60)
        second.ask("hello")
        assert kind_of(second.read_message()) == "StoreBusy"
    assert audit.ended.wait(60)


def test_bug_is_sent_to_the_client_and_logged(kit: ControlKit, caplog: pytest.LogCaptureFixture) -> None:
    kit.audit = raising(ZeroDivisionError("oh"))
    kit.start()
    assert "ZeroDivisionError" in kit.ask("verify")["error"]["message"]
    assert "ZeroDivisionError" in caplog.text
    assert kit.remote().process_identity.store == STORE


def test_call_whose_thread_cannot_start_does_not_prevent_the_stop(
    kit: ControlKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = kit.start()

    class UnstartableThread(Thread):
        start = raising(RuntimeError("can't start new thread"))

    with monkeypatch.context() as patch:
        patch.setattr(server_module, "Thread", UnstartableThread)
        with kit.connect() as client:
            client.ask("verify")
            assert client.response.status == 500
    assert kit.remote().process_identity.store == STORE
    server.stop()
    assert not (kit.folder / "control.sock").exists()


def test_query_only_reads_the_store(kit: ControlKit) -> None:
    kit.start()
    requested: list[str] = []
    watch(kit.janitor.store, before=lambda call: requested.append(call.name))
    remote = kit.remote()
    report = remote.plan(digest="mine").report
    remote.verify()
    remote.inspect("message", (), 1)
    assert sum(entry.rows for entry in report.topics) == 2
    assert {name.partition(".")[2] for name in requested} <= {"rows", "get", "keys", "cells"}


def test_plan_of_another_process_has_the_digest_of_its_settings(kit: ControlKit) -> None:
    kit.start()
    assert kit.remote().plan(digest="mine").document["config_digest"] == SETTINGS


def test_query_reports_its_progress(kit: ControlKit) -> None:
    kit.start()
    progress: list[tuple[str, TopicId | None, int]] = []
    kit.remote(lambda phase, topic, rows: progress.append((phase, topic, rows))).inspect("message", (), 1)
    assert progress == [("read", None, 3)]


class EndlessAudit:
    """An audit that runs until it must stop."""

    def __init__(self) -> None:
        self.began, self.ended = Event(), Event()

    def __call__(self, observer: Observer, is_stopping: Callable[[], bool]) -> Audit:
        self.began.set()
        while not is_stopping():
            observer("read", None, 1)
        self.ended.set()
        raise StopRequested("the janitor is stopping.")


def test_query_of_a_disconnected_client_stops(kit: ControlKit) -> None:
    kit.audit = audit = EndlessAudit()
    kit.start()
    with kit.connect() as client:
        client.ask("verify")
        assert audit.began.wait(60)
    assert audit.ended.wait(60)


def test_stop_during_a_query_reports_the_stop_to_its_client(kit: ControlKit) -> None:
    kit.audit = audit = EndlessAudit()
    server = kit.start()
    with kit.connect() as client:
        client.ask("verify")
        assert audit.began.wait(60)
        server.stop()
        assert kind_of(client.read_response()) == "StopRequested"


def test_client_that_connects_during_a_stop_is_disconnected(kit: ControlKit) -> None:
    began, stops, go = Event(), Event(), Event()

    def fake_audit(_: Observer, is_stopping: Callable[[], bool]) -> Audit:
        began.set()
        wait_until(is_stopping)
        stops.set()
        assert go.wait(60)
        return Audit(None)

    kit.audit = fake_audit
    server = kit.start(request_seconds=600)
    path, link = kit.folder / api.SOCKET_NAME, kit.folder / "link"
    link.hardlink_to(path)
    with kit.connect() as client, ThreadPoolExecutor(1) as threads:
        client.ask("verify")
        assert began.wait(60)
        stopped = threads.submit(server.stop)
        assert stops.wait(60)
        link.rename(path)
        with kit.connect() as late:
            late.socket.settimeout(server_module.STOP_SECONDS / 2)
            assert late.socket.recv(1) == b""
        go.set()
        stopped.result()


def test_query_with_unread_progress_completes(kit: ControlKit) -> None:
    def report_progress(observer: Observer, _: object) -> Audit:
        for _ in range(10_000):
            observer("read", None, 1)
        return Audit(None, cells=10_000)

    kit.audit = report_progress
    kit.start()
    assert kit.ask("verify")["result"]["cells"] == 10_000


def test_client_that_does_not_read_is_disconnected(kit: ControlKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "ANSWER_SECONDS", 0)
    kit.audit = lambda *_: Audit(None, withdrawn="x" * 10_000_000)
    kit.start()
    with kit.connect() as client:
        client.ask("verify")
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            client.response.read()


def test_sweep_now_triggers_one_sweep(kit: ControlKit) -> None:
    kit.start()
    kit.remote().sweep_now()
    assert (kit.views.swept, kit.views.refreshed) == (1, 0)


def test_apply_reports_only_the_progress_of_its_run(kit: ControlKit) -> None:
    kit.start()
    progress: list[str] = []
    remote = kit.remote(lambda phase, *_: progress.append(phase))
    wanted = plan.parse(remote.plan().document, "plan")
    progress.clear()
    kit.janitor.engine.run_once(patterns=("nobody:*",))
    assert not progress
    assert remote.apply(wanted).total(Rule.EXPIRED) == 2
    assert progress[:2] == ["expected", "message"]


def test_apply_of_a_disconnected_client_completes(kit: ControlKit) -> None:
    kit.start()
    began, go = Event(), Event()

    def pause(call: Call) -> None:
        if call.name == "message.delete":
            began.set()
            assert go.wait(60)

    wanted = values.pack(plan.parse(kit.remote().plan().document, "plan"))
    watch(kit.janitor.store, before=pause)
    with kit.connect() as client:
        client.ask("apply", wanted=wanted)
        assert began.wait(60)
    go.set()
    assert kit.server is not None
    kit.server.stop()
    [run] = kit.janitor.state.runs(1)
    assert (run.mode, run.result) == ("apply", "done")


class BusyEngine:
    """An engine with a run in progress, which the test ends."""

    def __init__(self, kit: ControlKit) -> None:
        self._engine = kit.janitor.engine
        self.requested, self.idle = Event(), Event()
        self.adopted = 0

    def is_running(self) -> bool:
        self.requested.set()
        return not self.idle.is_set()

    def adopt(self, *, once_for: str | None = None, store_id: str | None = None) -> list[TopicId]:
        self.adopted += 1
        return self._engine.adopt()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def test_adopt_during_a_run_waits_and_reports_the_wait(kit: ControlKit) -> None:
    working = BusyEngine(kit)
    kit.start(decider=working)
    with kit.connect() as client:
        client.ask("adopt")
        assert client.read_message() == {"progress": {"phase": "wait", "topic": None, "rows": 0}}
        assert working.adopted == 0
        working.idle.set()
        assert client.read_response() == {"result": [{"namespace": "default", "topic": "orders"}]}


def test_approve_during_a_run_does_not_wait(kit: ControlKit) -> None:
    kit.start(decider=BusyEngine(kit))
    assert kit.remote().approve((EVERYTHING,), clock=True) == []


def test_waiting_adopt_of_a_disconnected_client_is_canceled(kit: ControlKit) -> None:
    working = BusyEngine(kit)
    server = kit.start(decider=working)
    with kit.connect() as client:
        client.ask("adopt")
        assert working.requested.wait(60)
    server.stop()
    working.idle.set()
    assert working.adopted == 0


def test_waiting_adopt_at_a_stop_is_canceled(kit: ControlKit) -> None:
    working = BusyEngine(kit)
    server = kit.start(decider=working)
    with kit.connect() as client, ThreadPoolExecutor() as threads:
        client.ask("adopt")
        assert working.requested.wait(60)
        threads.submit(server.stop).result()
        assert kind_of(client.read_response()) == "StopRequested"
    assert working.adopted == 0


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (StoreError("the disk failed."), "failed"),
        (StateError("the disk failed."), "failed"),
        (StoreBusy("another one has it."), "refused"),
        (GuardTripped("too many rows."), "refused"),
    ],
)
def test_audit_log_separates_failed_from_rejected_decisions(
    kit: ControlKit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: TmsError, result: str
) -> None:
    caplog.set_level(logging.INFO, AUDIT)
    answer = api.answer

    def answered(behind: Any, method: str, *given: Any) -> Any:
        if method == "adopt":
            raise error
        return answer(behind, method, *given)

    monkeypatch.setattr(api, "answer", answered)
    kit.start()
    with pytest.raises(TmsError):
        kit.remote().adopt()
    [found] = [record.__dict__["fields"] for record in caplog.records if record.name == AUDIT]
    assert (found["verb"], found["result"]) == ("adopt", result)


def test_audit_log_has_decisions_and_no_queries(kit: ControlKit, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, AUDIT)
    kit.start()
    remote = kit.remote()
    remote.inspect("metadata", (), 10)
    remote.adopt()
    remote.approve(("default:orders",))
    found = [record.__dict__["fields"] for record in caplog.records if record.name == AUDIT]
    assert [one["verb"] for one in found] == ["adopt", "approve"]
    assert "default:orders" in found[1].pop("object")
    assert found[1] == {
        "event": "control.decision",
        "principal": f"uid:{os.geteuid()}",
        "address": "unix",
        "verb": "approve",
        "result": "done",
    }


def test_stop_leaves_the_socket_of_another_janitor(kit: ControlKit) -> None:
    server, path = kit.start(), kit.folder / "control.sock"
    path.rename(kit.folder / "moved")
    path.write_text("another's", encoding="utf-8")
    server.stop()
    assert path.exists()


def test_socket_serves_the_status_page_too(kit: ControlKit) -> None:
    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(scope["path"])(scope, receive, send)

    kit.start(page=page)
    with kit.connect() as client:
        client.send(b"GET /api/status HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert client.response.read() == b"/api/status"


def test_query_without_progress_sends_heartbeats(kit: ControlKit) -> None:
    go = Event()

    def silent(*_: object) -> Audit:
        assert go.wait(60)
        return Audit(None)

    kit.audit = silent
    kit.start(pulse_seconds=0.01)
    with kit.connect() as client:
        client.ask("verify")
        assert client.read_message() == {"progress": {}}
        go.set()
        assert "result" in client.read_response()


def test_decision_refreshes_the_status(kit: ControlKit) -> None:
    kit.start()
    remote = kit.remote()
    remote.adopt()
    remote.approve((EVERYTHING,), clock=True)
    assert kit.views.refreshed == 2
