"""The routes of the status page: responses, rejections, and isolated failures."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest

from janitor.state.figures import GuardNote
from janitor.status.status import Status
from tests.builders import NOW_MS
from tests.janitor.http import statuses
from tests.janitor.http.conftest import Answer, DirectClient, HttpKit
from tests.janitor.http.statuses import FixedViews
from tests.support import raising, record_calls
from tms_core.errors import StateBusy, StateError, StateUnavailable

PATHS = ("/", "/api/status", "/api/runs", "/healthz", "/readyz", "/metrics")

Serve = Callable[..., HttpKit]


@pytest.fixture
def views() -> FixedViews:
    return FixedViews(statuses.full(NOW_MS), statuses.runs(NOW_MS))


@pytest.fixture
def app(views: FixedViews) -> DirectClient:
    return DirectClient(views)


def status(app: DirectClient) -> dict[str, Any]:
    answer = app.ask("/api/status")
    assert answer.status == 200
    document: dict[str, Any] = json.loads(answer.body)
    return document


def problem_of(answer: Answer) -> tuple[str, str]:
    """Return code and detail of an error response."""
    document = json.loads(answer.body)
    assert answer.headers["content-type"] == "application/problem+json"
    assert (document["code"], document["status"]) == (answer.headers["x-tms-error"], answer.status)
    return document["code"], document["detail"]


def test_page_is_the_packaged_file_and_loads_nothing_external(app: DirectClient) -> None:
    answer = app.ask("/")
    page = files("janitor.http").joinpath("page.html").read_bytes()
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.body == page
    assert re.findall(rb"https?://|[\"'(]//|@import|\bsrc=|url\(", page) == []


def test_content_policy_allows_only_the_style_and_script_of_the_page(app: DirectClient) -> None:
    answer = app.ask("/")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))

    def digest(tag: str) -> str:
        [block] = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), answer.body, flags=re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(block).digest()).decode()}'"

    assert policy == {
        "default-src": "'none'",
        "script-src": digest("script"),
        "style-src": digest("style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }


@pytest.mark.parametrize("path", [*PATHS, "/nothing", "/api/runs?limit=x"])
@pytest.mark.parametrize("host", ["localhost", "evil.example"])
def test_every_response_has_the_security_headers(app: DirectClient, path: str, host: str) -> None:
    headers = app.ask(path, host=host).headers
    assert headers["content-security-policy"].startswith("default-src 'none'; ")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers


def test_status_response_is_the_status_with_derived_fields(app: DirectClient, views: FixedViews) -> None:
    document = status(app)
    expected = json.loads(json.dumps(views.shown.to_json()))
    added = {name: document.pop(name) for name in ("alive", "ready", "health", "adopt_command")}
    assert document == expected
    assert added == {
        "alive": "",
        "ready": "",
        "health": {"level": "well", "reasons": [{"text": "A run is in progress.", "about": "", "condition": None}]},
        "adopt_command": "janitor adopt --config janitor.yaml",
    }


def test_status_has_guard_messages_with_complete_commands(app: DirectClient, views: FixedViews) -> None:
    note = GuardNote("adoption", True, "not adopted yet; look at janitor plan, then: janitor adopt")
    views.shown = replace(views.shown, guards=(note,))
    whole = "not adopted yet; look at janitor plan --config janitor.yaml, then: janitor adopt --config janitor.yaml"
    assert [entry["message"] for entry in status(app)["guards"]] == [whole]


def test_status_has_resume_commands_quoted_for_a_shell(app: DirectClient, views: FixedViews) -> None:
    views.shown = statuses.wrong(NOW_MS)
    document = status(app)
    assert [entry["command"] for entry in (*document["paused"], document["quarantined"][1])] == [
        "janitor resume --config janitor.yaml",
        """janitor resume 'team'"'"'s:*' --config janitor.yaml""",
        "janitor resume default:audit --config janitor.yaml",
    ]


def test_metrics_keep_their_content_type(app: DirectClient) -> None:
    answer = app.ask("/metrics")
    assert answer.body == b"tms_janitor_heartbeat_timestamp_seconds 1\n"
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_status_is_rendered_once_while_unchanged(
    app: DirectClient, views: FixedViews, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = record_calls(monkeypatch, Status, "to_json")
    assert status(app) == status(app)
    assert len(rendered) == 1
    views.shown = replace(views.shown, schedule="every 5 s")
    assert status(app)["schedule"] == "every 5 s"
    assert len(rendered) == 2


def test_status_of_a_hung_loop_is_down(app: DirectClient, views: FixedViews) -> None:
    assert status(app)["health"]["level"] == "well"
    views.not_alive = "the loop hangs"
    reason = {"text": "the loop hangs", "about": "", "condition": None}
    assert status(app)["health"] == {"level": "down", "reasons": [reason]}
    views.not_alive, views.not_ready = "", "the store is gone"
    assert status(app)["ready"] == "the store is gone"


def test_status_of_many_topics_is_compressed_on_request(app: DirectClient, views: FixedViews) -> None:
    views.shown = replace(views.shown, topics=statuses.topics(NOW_MS, 3000))
    plain = app.ask("/api/status")
    zipped = app.ask("/api/status", accept_encoding="gzip")
    assert gzip.decompress(zipped.body) == plain.body
    assert len(zipped.body) * 8 < len(plain.body)


def test_runs_are_newest_first_and_limited_to_100_by_default(app: DirectClient, views: FixedViews) -> None:
    runs = json.loads(app.ask("/api/runs").body)["runs"]
    assert [run["id"] for run in runs] == [run.id for run in views.runs[:100]]
    assert runs[0]["phase_seconds"] == dict(views.runs[0].phase_seconds)
    assert len(json.loads(app.ask("/api/runs?limit=1").body)["runs"]) == 1
    assert app.ask("/api/runs?limit=1000").status == 200


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "+5", "1.5", "", "ten", "1_0", "%D9%A3", "99999999999999999999"])
def test_runs_with_an_invalid_limit_are_rejected(app: DirectClient, views: FixedViews, limit: str) -> None:
    answer = app.ask(f"/api/runs?limit={limit}")
    assert answer.status == 400
    code, detail = problem_of(answer)
    assert code == "TMS-BAD-REQUEST"
    assert re.search(r"limit .*\b1 to 1000", detail)
    assert views.requests == []


@pytest.mark.parametrize(("path", "attribute"), [("/healthz", "not_alive"), ("/readyz", "not_ready")])
def test_probe_responds_ok_or_with_the_reason(app: DirectClient, views: FixedViews, path: str, attribute: str) -> None:
    assert app.ask(path)[::2] == (200, b"ok")
    setattr(views, attribute, "the loop showed no sign of life for 300 s")
    assert app.ask(path)[::2] == (503, b"the loop showed no sign of life for 300 s")


def test_probes_with_every_worker_thread_blocked_respond(serve: Serve) -> None:
    entered, release = threading.Semaphore(0), threading.Event()

    class BlockedViews(FixedViews):
        def status(self) -> Status:
            entered.release()
            release.wait()
            return super().status()

    kit = serve(BlockedViews(statuses.empty(NOW_MS)))
    clients = [socket.create_connection(("127.0.0.1", kit.server.port)) for _ in range(60)]
    try:
        for client in clients:
            client.sendall(b"GET /api/status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        for _ in range(40):  # the number of worker threads
            assert entered.acquire(timeout=20)
        assert kit.ask("/healthz").status == 200
        assert kit.ask("/readyz").status == 200
    finally:
        release.set()
        for client in clients:
            client.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [("metrics", "/metrics"), ("status", "/api/status"), ("past", "/api/runs"), ("alive", "/healthz")],
)
def test_view_that_fails_responds_500_and_logs_the_error(
    views: FixedViews, caplog: pytest.LogCaptureFixture, method: str, path: str
) -> None:
    setattr(views, method, raising(LookupError("a bug")))
    app = DirectClient(views)
    answer = app.ask(path)
    assert answer.status == 500
    assert problem_of(answer)[0] == "TMS-INTERNAL"
    [record] = caplog.records
    assert record.getMessage().endswith(f" {path}: a bug")
    assert record.exc_info
    assert [app.ask(other).status for other in ("/", "/readyz")] == [200, 200]


@pytest.mark.parametrize(("error", "status"), [(StateUnavailable, 503), (StateBusy, 503), (StateError, 500)])
def test_view_without_its_state_responds_with_the_code_of_the_error(
    views: FixedViews, caplog: pytest.LogCaptureFixture, error: type[StateError], status: int
) -> None:
    views.past = raising(error("/srv/state cannot be read."))  # type: ignore[method-assign]
    answer = DirectClient(views).ask("/api/runs")
    assert (answer.status, problem_of(answer)[0]) == (status, error.code)
    assert "/srv/state" not in str(problem_of(answer))
    assert "/srv/state cannot be read." in caplog.text


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_request_with_a_writing_method_is_rejected(
    app: DirectClient, views: FixedViews, path: str, method: str
) -> None:
    answer = app.ask(path, method)
    assert answer.status == 405
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}
    assert problem_of(answer)[0] == "TMS-METHOD-NOT-ALLOWED"
    assert views.requests == []


@pytest.mark.parametrize("path", ["/nothing", "/api", "/api/status/", "/page.html", "/../page.html"])
def test_request_for_an_unknown_path_is_not_found(app: DirectClient, path: str) -> None:
    answer = app.ask(path)
    assert answer.status == 404
    assert problem_of(answer)[0] == "TMS-NO-ROUTE"


@pytest.mark.parametrize("host", ["localhost", "LocalHost:9847", "127.0.0.1", "127.8.8.8:1", "[::1]", "[::1]:9847"])
def test_loopback_host_name_on_loopback_is_accepted(app: DirectClient, host: str) -> None:
    assert app.ask("/healthz", host=host).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]:80", "", "localhost:x"],
)
@pytest.mark.parametrize("path", PATHS)
def test_foreign_host_on_loopback_is_rejected(app: DirectClient, views: FixedViews, path: str, host: str) -> None:
    answer = app.ask(path, host=host)
    assert answer.status == 400
    assert problem_of(answer)[0] == "TMS-BAD-REQUEST"
    assert views.requests == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "janitor.example"])  # noqa: S104 nothing is bound
def test_any_host_name_on_a_public_address_is_accepted(views: FixedViews, host: str) -> None:
    response = DirectClient(views, host).ask("/api/status", host="janitor.example", origin="http://grafana.example")
    assert response.status == 200


def test_request_with_two_hosts_is_rejected(app: DirectClient, views: FixedViews) -> None:
    answer = app.ask("/api/status", HOST="localhost")
    assert (answer.status, problem_of(answer)[0], views.requests) == (400, "TMS-BAD-REQUEST", [])


def test_origin_of_another_site_on_loopback_is_rejected(app: DirectClient, views: FixedViews) -> None:
    for origin in ("http://evil.example", "null", "http://localhost:3000"):
        answer = app.ask("/api/status", origin=origin)
        assert answer.status == 403
        assert problem_of(answer)[0] == "TMS-FORBIDDEN"
    assert views.requests == []
    assert app.ask("/api/status", origin="http://localhost").status == 200
