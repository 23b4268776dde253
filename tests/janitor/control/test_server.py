"""The control socket's server: who may ask, what becomes of bad clients, and that none of them holds up the work."""

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
from threading import Event
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
from tests.support import raising
from tms_core.errors import GuardTripped, StateError, StopRequested, StoreBusy, StoreError, TmsError
from tms_core.logs.loggers import AUDIT
from tms_core.topic import TopicId

ORDERS = TopicId("default", "orders")


def kind_of(answer: dict[str, Any]) -> str:
    return str(answer["error"]["kind"])


def test_given_any_umask_then_only_its_owner_may_use_the_socket(kit: ControlKit) -> None:
    former = os.umask(0)
    try:
        kit.start()
    finally:
        os.umask(former)
    found = (kit.folder / "control.sock").stat()
    assert stat.S_IMODE(found.st_mode) == 0o600


def test_given_the_socket_of_a_dead_process_then_it_is_replaced(kit: ControlKit) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(kit.folder / "control.sock"))
    kit.start()
    assert kit.remote().process_identity.store == STORE


def test_given_a_janitor_that_answers_there_then_its_socket_is_left_to_it(kit: ControlKit, tmp_path: Path) -> None:
    kit.start()
    second = ControlKit(tmp_path, kit.janitor, kit.observers)
    with pytest.raises(StoreBusy, match="Another janitor listens"):
        second.start()
    assert kit.remote().process_identity.store == STORE


def test_given_a_file_of_that_name_then_it_is_left_alone(kit: ControlKit) -> None:
    path = kit.folder / "control.sock"
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(StoreError, match="is not a socket"):
        kit.start()
    assert path.read_text(encoding="utf-8") == "mine"


def test_given_a_folder_that_is_not_there_then_the_error_names_it(kit: ControlKit, tmp_path: Path) -> None:
    kit.folder = tmp_path / "missing"
    with pytest.raises(StoreError, match=r"missing/control\.sock .*No such file"):
        kit.start()


def test_given_a_stop_then_the_socket_is_gone_and_a_second_stop_is_no_error(kit: ControlKit) -> None:
    server = kit.start()
    server.stop()
    assert not (kit.folder / "control.sock").exists()
    server.stop()


@pytest.mark.parametrize(("uid", "welcome"), [(4711, True), (0, True), (12345, False)])
def test_given_a_users_process_then_it_is_answered_if_it_is_the_owners_or_roots(
    kit: ControlKit, monkeypatch: pytest.MonkeyPatch, uid: int, welcome: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(server_module, "peer_uid", lambda _: uid)
    kit.start()
    assert ("result" in kit.ask("hello")) is welcome


def test_given_a_connection_then_the_kernel_says_whose_it_is() -> None:
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
def test_garbage_is_refused_and_the_next_client_answered(kit: ControlKit, method: str, body: bytes) -> None:
    kit.start()
    with kit.connect() as client:
        client.post(method, body)
        answer = client.hear()
        assert kind_of(answer) == "TmsError"
        assert "is invalid" in answer["error"]["message"]
        assert client.line() == b""
    assert kit.remote().process_identity.settings == SETTINGS


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b'{"protocol": 1, "method": "hello", "params": {}}\n']
)
def test_text_that_is_no_question_is_refused(kit: ControlKit, said: bytes) -> None:
    kit.start()
    with kit.connect() as client:
        client.say(said)
        assert client.response.status in (400, 404)
    assert kit.remote().process_identity.settings == SETTINGS


def test_given_an_endless_question_then_it_is_refused(kit: ControlKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BYTES", 1000)
    kit.start()
    with Client(kit.folder) as client:
        client.post("verify", b"x" * 1001)
        assert client.response.status == 413
        assert "more than 1000 bytes" in json.dumps(client.hear())


def test_answer_that_is_too_long_is_an_error(kit: ControlKit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.start()
    remote = kit.remote()
    monkeypatch.setattr(wire, "MAX_BYTES", 300)
    with pytest.raises(StoreError, match="exceed the limit"):
        remote.plan()


def test_given_another_protocol_then_both_versions_are_named(kit: ControlKit) -> None:
    kit.start()
    with kit.connect() as client:
        client.post("hello", b'{"protocol": 99, "params": {}}')
        answer = client.hear()
    assert kind_of(answer) == "StoreBusy"
    assert " 99" in answer["error"]["message"]


@pytest.mark.parametrize("said", [b"", b"POST /cont", b"POST /control/verify HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"])
def test_given_a_client_that_breaks_off_then_the_next_one_is_answered(kit: ControlKit, said: bytes) -> None:
    kit.start()
    with kit.connect() as client:
        client.say(said)
    assert kit.remote().verify().cells == 0


def test_given_a_client_that_says_nothing_then_it_is_sent_away(kit: ControlKit) -> None:
    kit.start(request_seconds=0.01)
    with kit.connect() as client:
        assert client.line() == b""


def test_client_beyond_the_limit_is_sent_away(kit: ControlKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CLIENTS", 1)
    kit.act = endless = Endless()
    kit.start()
    with kit.connect() as first, kit.connect() as second:
        first.ask("verify")
        assert endless.began.wait(60)
        second.ask("hello")
        assert kind_of(second.hear()) == "StoreBusy"
    assert endless.ended.wait(60)


def test_bug_is_told_to_the_client_and_logged(kit: ControlKit, caplog: pytest.LogCaptureFixture) -> None:
    kit.act = raising(ZeroDivisionError("oh"))
    kit.start()
    assert "ZeroDivisionError" in kit.ask("verify")["error"]["message"]
    assert "ZeroDivisionError" in caplog.text
    assert kit.remote().process_identity.store == STORE


def test_given_a_question_then_nothing_is_asked_of_the_store_that_writes(kit: ControlKit) -> None:
    kit.start()
    asked: list[str] = []
    watch(kit.janitor.store, before=lambda call: asked.append(call.name))
    remote = kit.remote()
    report = remote.plan(digest="mine").report
    remote.verify()
    remote.inspect("message", (), 1)
    assert sum(entry.rows for entry in report.topics) == 2
    assert {name.partition(".")[2] for name in asked} <= {"rows", "get", "keys", "cells"}


def test_given_a_question_then_its_progress_is_heard(kit: ControlKit) -> None:
    kit.start()
    heard: list[tuple[str, TopicId | None, int]] = []
    kit.remote(lambda phase, topic, rows: heard.append((phase, topic, rows))).inspect("message", (), 1)
    assert heard == [("read", None, 3)]


class Endless:
    """An audit that goes on until it is told to end."""

    def __init__(self) -> None:
        self.began, self.ended = Event(), Event()

    def __call__(self, observer: Observer, is_stopping: Callable[[], bool]) -> Audit:
        self.began.set()
        while not is_stopping():
            observer("read", None, 1)
        self.ended.set()
        raise StopRequested("the janitor is stopping.")


def test_given_a_client_that_goes_away_then_its_question_ends(kit: ControlKit) -> None:
    kit.act = endless = Endless()
    kit.start()
    with kit.connect() as client:
        client.ask("verify")
        assert endless.began.wait(60)
    assert endless.ended.wait(60)


def test_given_a_question_under_way_when_stopped_then_the_client_is_told(kit: ControlKit) -> None:
    kit.act = endless = Endless()
    server = kit.start()
    with kit.connect() as client:
        client.ask("verify")
        assert endless.began.wait(60)
        server.stop()
        assert kind_of(client.answer()) == "StopRequested"


def test_given_a_client_that_reads_nothing_then_its_question_is_not_held_up(kit: ControlKit) -> None:
    def chatty(observer: Observer, _: object) -> Audit:
        for _ in range(10_000):
            observer("read", None, 1)
        return Audit(None, cells=10_000)

    kit.act = chatty
    kit.start()
    assert kit.ask("verify")["result"]["cells"] == 10_000


def test_client_that_does_not_read_is_cut_off(kit: ControlKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "ANSWER_SECONDS", 0)
    kit.act = lambda *_: Audit(None, withdrawn="x" * 10_000_000)
    kit.start()
    with kit.connect() as client:
        client.ask("verify")
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            client.response.read()


def test_control_server_asked_to_sweep_has_the_holder_do_so_once(kit: ControlKit) -> None:
    kit.start()
    kit.remote().sweep_now()
    assert (kit.views.swept, kit.views.refreshed) == (1, 0)


def test_given_a_run_then_who_asked_for_it_hears_how_far_it_is_and_nobody_else(kit: ControlKit) -> None:
    kit.start()
    heard: list[str] = []
    remote = kit.remote(lambda phase, *_: heard.append(phase))
    wanted = plan.parse(remote.plan().document, "plan")
    heard.clear()
    kit.janitor.engine.run_once(patterns=("nobody:*",))
    assert not heard
    assert remote.apply(wanted).total(Rule.EXPIRED) == 2
    assert heard[:2] == ["expected", "message"]


def test_apply_of_a_client_that_goes_away_runs_to_its_end(kit: ControlKit) -> None:
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


class Working:
    """A decider with a run under way, until the test lets it end."""

    def __init__(self, kit: ControlKit) -> None:
        self._engine = kit.janitor.engine
        self.asked, self.idle = Event(), Event()
        self.adopted = 0

    def is_running(self) -> bool:
        self.asked.set()
        return not self.idle.is_set()

    def adopt(self, *, once_for: str | None = None, store_id: str | None = None) -> list[TopicId]:
        self.adopted += 1
        return self._engine.adopt()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def test_given_a_run_under_way_then_a_decision_waits_and_says_for_what(kit: ControlKit) -> None:
    working = Working(kit)
    kit.start(decider=working)
    with kit.connect() as client:
        client.ask("adopt")
        assert client.hear() == {"progress": {"phase": "wait", "topic": None, "rows": 0}}
        assert working.adopted == 0
        working.idle.set()
        assert client.answer() == {"result": [{"namespace": "default", "topic": "orders"}]}


def test_given_a_run_under_way_then_an_approval_does_not_wait(kit: ControlKit) -> None:
    kit.start(decider=Working(kit))
    assert kit.remote().approve((EVERYTHING,), clock=True) == []


def test_given_a_client_that_goes_away_while_its_decision_waits_then_it_is_not_taken(kit: ControlKit) -> None:
    working = Working(kit)
    server = kit.start(decider=working)
    with kit.connect() as client:
        client.ask("adopt")
        assert working.asked.wait(60)
    server.stop()
    working.idle.set()
    assert working.adopted == 0


def test_given_a_waiting_decision_when_stopped_then_it_is_not_taken(kit: ControlKit) -> None:
    working = Working(kit)
    server = kit.start(decider=working)
    with kit.connect() as client, ThreadPoolExecutor() as threads:
        client.ask("adopt")
        assert working.asked.wait(60)
        threads.submit(server.stop).result()
        assert kind_of(client.answer()) == "StopRequested"
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
def test_decision_that_fails_is_told_from_a_refused_one_in_the_audit_log(
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


def test_decision_is_audited_and_a_question_is_not(kit: ControlKit, caplog: pytest.LogCaptureFixture) -> None:
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
        client.say(b"GET /api/status HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert client.response.read() == b"/api/status"


def test_long_work_without_progress_sends_a_sign(kit: ControlKit) -> None:
    go = Event()

    def silent(*_: object) -> Audit:
        assert go.wait(60)
        return Audit(None)

    kit.act = silent
    kit.start(pulse_seconds=0.01)
    with kit.connect() as client:
        client.ask("verify")
        assert client.hear() == {"progress": {}}
        go.set()
        assert "result" in client.answer()


def test_decision_refreshes_the_status(kit: ControlKit) -> None:
    kit.start()
    remote = kit.remote()
    remote.adopt()
    remote.approve((EVERYTHING,), clock=True)
    assert kit.views.refreshed == 2
