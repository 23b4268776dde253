"""The host check of a server on a loopback address: its own pages and programs, no other web sites."""

from __future__ import annotations

import pytest

from tests.server.client import Client
from tests.server.conftest import serving
from tms_core.web.listener import is_of_foreign_page

OWN = (b"host", b"localhost:11015")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"origin", b"http://localhost:11015")],
        [(b"sec-fetch-site", b"same-origin"), (b"origin", b"null")],  # a form of the server that hides its origin
        [(b"sec-fetch-site", b"none")],
        [(b"sec-fetch-site", b"cross-site")],  # a user followed a link
    ],
)
def test_programs_and_the_servers_own_pages_are_not_foreign(headers: list[tuple[bytes, bytes]]) -> None:
    assert not is_of_foreign_page({"scheme": "http", "headers": [OWN, *headers]})


@pytest.mark.parametrize(
    "headers",
    [
        [(b"origin", b"http://evil.example")],
        [(b"origin", b"null")],
        [(b"origin", b"https://localhost:11015")],
        [(b"origin", b"http://localhost:3000"), (b"sec-fetch-site", b"same-site")],
        [(b"sec-fetch-site", b"cross-site"), (b"origin", b"http://evil.example")],
    ],
)
def test_other_pages_are_foreign(headers: list[tuple[bytes, bytes]]) -> None:
    assert is_of_foreign_page({"scheme": "http", "headers": [OWN, *headers]})
    assert is_of_foreign_page({"scheme": "http", "headers": [*headers, OWN]})


@pytest.mark.parametrize("verb", ["publish", "store", "rollback", "poll"])
def test_form_of_another_web_site_is_rejected(client: Client, verb: str) -> None:
    path = f"/v1/namespaces/default/topics/any/{verb}"
    answer = client.ask("POST", path, b"\0", content_type="text/plain", origin="https://evil.example")
    assert answer.status == 403
    assert "sites" in answer.text


def test_origin_is_not_checked_beyond_loopback() -> None:
    with serving(loopback=False) as server, Client(server.port) as client:
        assert client.ask("GET", "/ping", origin="https://console.example").status == 200


@pytest.mark.parametrize("second", ["localhost", "other.example"])
@pytest.mark.parametrize("loopback", [True, False])
def test_request_with_two_host_headers_is_rejected(second: str, loopback: bool) -> None:
    with serving(loopback=loopback) as server, Client(server.port) as client:
        assert client.ask("GET", "/ping", HOST=second).status == 400
        assert client.ask("GET", "/ping").status == 200
