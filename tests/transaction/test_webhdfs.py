"""Snapshots on HDFS over WebHDFS, with a simulated NameNode and DataNode."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit

import httpx2
import pytest

from tests.builders import encode_state
from tms_core.errors import ConfigurationError, NoSnapshot, TmsError
from tms_core.transaction.model import VisibilityState
from tms_core.transaction.source.source import DirectorySource, NoUsableSnapshot, Rejection

FOLDER = "/cdap/tx snapshot"


class Hdfs:
    """The state of both simulated nodes.

    Attributes:
        files: the content by path; None: a folder.
        refused: the status and the ``RemoteException`` of all responses of the NameNode; None: it serves requests.
        listed: called after a folder was listed.
        broken: whether the DataNode sends only a half of a file.
        users: the user of each request.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes | None] = {}
        self.refused: tuple[int, dict[str, str] | None] | None = None
        self.listed: Callable[[], None] = lambda: None
        self.broken = False
        self.users: list[str | None] = []
        self.datanode = ""


class Handler(BaseHTTPRequestHandler):
    hdfs: Hdfs

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def answer_json(self, status: int, body: object) -> None:
        self.answer(status, json.dumps(body).encode(), **{"Content-Type": "application/json"})

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Write nothing to the terminal."""

    @property
    def target(self) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        return unquote(parts.path).removeprefix("/webhdfs/v1"), parse_qs(parts.query)


class NameNode(Handler):
    def do_GET(self) -> None:
        path, target = self.target
        self.hdfs.users.append(target.get("user.name", [None])[0])
        if self.hdfs.refused is not None:
            status, error = self.hdfs.refused
            self.answer_json(status, "no" if error is None else {"RemoteException": error})
        elif path not in self.hdfs.files and not any(name.startswith(f"{path}/") for name in self.hdfs.files):
            error = {"exception": "FileNotFoundException", "message": f"File {path} does not exist.\n\tat some.Java"}
            self.answer_json(404, {"RemoteException": error})
        elif target["op"] == ["LISTSTATUS"]:
            self.answer_json(200, {"FileStatuses": {"FileStatus": self.statuses(path)}})
            self.hdfs.listed()
        else:
            self.answer(307, Location=f"{self.hdfs.datanode}{self.path}")

    def statuses(self, path: str) -> list[dict[str, str]]:
        if path in self.hdfs.files:
            return [{"pathSuffix": "", "type": "FILE"}]
        below = {name.removeprefix(f"{path}/"): content for name, content in self.hdfs.files.items()}
        return [
            {"pathSuffix": name, "type": "DIRECTORY" if content is None else "FILE"} for name, content in below.items()
        ]


class DataNode(Handler):
    def do_GET(self) -> None:
        content = self.hdfs.files[self.target[0]]
        assert content is not None
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if self.hdfs.broken else content)
        self.close_connection = True


@pytest.fixture
def hdfs() -> Hdfs:
    return Hdfs()


@pytest.fixture
def namenode(hdfs: Hdfs) -> Iterator[str]:
    servers = []
    for kind in (DataNode, NameNode):
        handler = type(kind.__name__, (kind,), {"hdfs": hdfs})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    data, address = (f"127.0.0.1:{server.server_address[1]}" for server in servers)
    hdfs.datanode = f"http://{data}"
    yield address
    for server in servers:
        server.shutdown()
        server.server_close()


def content(at_ms: int, invalid: int = 1) -> bytes:
    return encode_state(VisibilityState(at_ms, 5000, 5000, array("q", range(1, invalid + 1))))


def test_newest_complete_snapshot_on_hdfs_is_used(hdfs: Hdfs, namenode: str) -> None:
    hdfs.files = {
        f"{FOLDER}/snapshot.1": content(1),
        f"{FOLDER}/snapshot.2": content(2, invalid=5000),
        f"{FOLDER}/snapshot.3": content(3)[:-3],
        f"{FOLDER}/txlog.2": b"",
        f"{FOLDER}/snapshot.9": None,
    }
    found = DirectorySource.at(f"webhdfs://cdap@{namenode}{FOLDER}/").latest()
    assert (found.name, found.snapshot.timestamp_ms, len(found.snapshot.invalid)) == ("snapshot.2", 2, 5000)
    assert [(one.name, one.reason) for one in found.rejected] == [("snapshot.3", Rejection.TRUNCATED)]
    assert found.ignored == 2
    assert set(hdfs.users) == {"cdap"}


def test_single_file_on_hdfs_is_used(hdfs: Hdfs, namenode: str) -> None:
    hdfs.files = {f"{FOLDER}/snapshot.7": content(7)}
    found = DirectorySource.at(f"webhdfs://{namenode}{FOLDER}/snapshot.7").latest()
    assert (found.name, found.snapshot.timestamp_ms, found.notes) == ("snapshot.7", 7, ())
    assert set(hdfs.users) == {None}


def test_file_deleted_after_the_listing_is_listed_again(hdfs: Hdfs, namenode: str) -> None:
    hdfs.files = {f"{FOLDER}/snapshot.1": content(1)}

    def replace_files() -> None:
        hdfs.files = {f"{FOLDER}/snapshot.2": content(2)}

    hdfs.listed = replace_files
    assert DirectorySource.at(f"webhdfs://{namenode}{FOLDER}").latest().name == "snapshot.2"


def test_broken_connection_makes_a_file_unreadable_not_truncated(hdfs: Hdfs, namenode: str) -> None:
    hdfs.files, hdfs.broken = {f"{FOLDER}/snapshot.1": content(1, invalid=9000)}, True
    with pytest.raises(NoUsableSnapshot) as caught:
        DirectorySource.at(f"webhdfs://{namenode}{FOLDER}").latest()
    assert [(one.reason, "incomplete" in one.detail) for one in caught.value.rejected] == [(Rejection.UNREADABLE, True)]


def test_standby_or_missing_namenode_is_replaced_by_the_other(hdfs: Hdfs, namenode: str) -> None:
    hdfs.files = {f"{FOLDER}/snapshot.1": content(1)}
    waiting = Hdfs()
    waiting.refused = (403, {"exception": "StandbyException", "message": "Operation category READ is not supported"})
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Waiting", (NameNode,), {"hdfs": waiting})) as standby:
        Thread(target=standby.serve_forever, args=(0.01,), daemon=True).start()
        first = f"127.0.0.1:{standby.server_address[1]}"
        both = DirectorySource.at(f"webhdfs://{first},{namenode}{FOLDER}")
        assert both.latest().name == "snapshot.1"
        with pytest.raises(NoSnapshot, match=f"{first} is on standby") as caught:
            DirectorySource.at(f"webhdfs://{first}{FOLDER}").latest()
        assert "transactions.source: thrift" in caught.value.hint
        standby.shutdown()
    assert both.latest().name == "snapshot.1"


@pytest.mark.parametrize(
    ("status", "error", "body"),
    [
        (404, {"exception": "FileNotFoundException", "message": "File /x does not exist.\n\tat Java"}, "not exist. "),
        (403, {"exception": "AccessControlException", "message": "Permission denied: user=dr.who"}, "user=dr.who"),
        (401, None, "requires a Kerberos login"),
        (500, None, "responds with 500"),
    ],
)
def test_rejection_of_a_namenode_is_a_readable_error(
    hdfs: Hdfs, namenode: str, status: int, error: dict[str, str] | None, body: str
) -> None:
    hdfs.refused = (status, error)
    with pytest.raises(NoSnapshot) as caught:
        DirectorySource.at(f"webhdfs://{namenode}{FOLDER}").latest()
    assert body in f"{caught.value.message} "
    assert ".." not in caught.value.message
    assert f"webhdfs://{namenode}{FOLDER}: " in caught.value.message
    assert "Java" not in caught.value.message


@pytest.mark.parametrize(("location", "status"), [("http", "refused"), ("https", "served")])
def test_webhdfs_redirect_to_a_weaker_scheme_is_rejected(
    monkeypatch: pytest.MonkeyPatch, location: str, status: str
) -> None:
    seen = []

    def serve(request: httpx2.Request) -> httpx2.Response:
        seen.append(str(request.url.copy_with(query=None)))
        if "op=LISTSTATUS" in str(request.url):
            return httpx2.Response(200, json={"FileStatuses": {"FileStatus": [{"pathSuffix": "", "type": "FILE"}]}})
        if request.url.host == "namenode":
            return httpx2.Response(307, headers={"location": f"{location}://datanode:9864/snapshot.7"})
        return httpx2.Response(200, content=content(7))

    client = partial(httpx2.Client, transport=httpx2.MockTransport(serve))
    monkeypatch.setattr("tms_core.transaction.source.webhdfs.httpx2.Client", client)
    source = DirectorySource.at("swebhdfs://namenode:9871/tx/snapshot.7")
    if status == "served":
        assert source.latest().snapshot.timestamp_ms == 7
        return
    with pytest.raises(NoUsableSnapshot) as caught:
        source.latest()
    assert "redirects to http://datanode, which is not encrypted" in caught.value.rejected[0].detail
    assert all(url.startswith("https:") for url in seen)


@pytest.mark.parametrize(
    "body", [b"[" * 200_000, b'{"FileStatuses": {"FileStatus": [{"pathSuffix": 5, "type": "FILE"}]}}']
)
def test_webhdfs_listing_that_makes_no_sense_is_an_error(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, content=body))
    monkeypatch.setattr(
        "tms_core.transaction.source.webhdfs.httpx2.Client", partial(httpx2.Client, transport=transport)
    )
    with pytest.raises(TmsError):
        DirectorySource.at(f"webhdfs://namenode:9870{FOLDER}").latest()


def test_response_without_webhdfs_is_a_clear_error(hdfs: Hdfs, namenode: str) -> None:
    hdfs.refused = (200, None)
    with pytest.raises(NoSnapshot, match="not WebHDFS"):
        DirectorySource.at(f"webhdfs://{namenode}{FOLDER}").latest()


def test_unreachable_namenode_is_named() -> None:
    with pytest.raises(NoSnapshot, match=r"127\.0\.0\.1:1 "):
        DirectorySource.at(f"webhdfs://127.0.0.1:1{FOLDER}").latest()


@pytest.mark.parametrize(
    "url",
    ["webhdfs://namenode/tx", "hdfs://namenode:8020/tx", "webhdfs://namenode:9870", "webhdfs://:9870/tx", "s3://b/x"],
)
def test_invalid_hdfs_url_is_rejected_with_an_example(url: str) -> None:
    with pytest.raises(ConfigurationError, match="HDFS") as caught:
        DirectorySource.at(url)
    assert "webhdfs://NAMENODE:PORT/PATH" in caught.value.hint


def test_webhdfs_that_rejects_a_ticket_is_quoted_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "<h2>HTTP ERROR 403 GSSException: Failure (Mechanism level: Clock skew too great (37))</h2>\n<p>more</p>"
    transport = httpx2.MockTransport(lambda _: httpx2.Response(403, text=page))
    client = partial(httpx2.Client, transport=transport)
    monkeypatch.setattr("tms_core.transaction.source.webhdfs.httpx2.Client", client)
    with pytest.raises(NoSnapshot, match="Clock skew too great"):
        DirectorySource.at(f"webhdfs://namenode:9870{FOLDER}").latest()
