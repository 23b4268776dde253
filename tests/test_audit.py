"""``make audit``: locked packages are looked up, and a known vulnerability fails it."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: The response of the service for a package with a vulnerability.
KNOWN = {
    "vulns": [
        {
            "id": "PYSEC-0000-1",
            "published": "2026-01-01T00:00:00Z",
            "summary": "an invented vulnerability",
            "affected": [
                {
                    "package": {"name": "pyjwt", "ecosystem": "PyPI"},
                    "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "999"}]}],
                }
            ],
        }
    ]
}


@contextmanager
def service(vulnerable: str | None) -> Iterator[tuple[str, set[str]]]:
    """Run a vulnerability service on a free port; yield its URL and the packages that it was asked for."""
    queried: set[str] = set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["content-length"])))
            queried.add(query["package"]["name"])
            body = json.dumps(KNOWN if query["package"]["name"] == vulnerable else {}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Keep the test's output free of the requests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1/query", queried
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("vulnerable", "passes"), [(None, True), ("pyjwt", False)])
def test_audit_with_a_vulnerable_package_fails(vulnerable: str | None, passes: bool, tmp_path: Path) -> None:
    with service(vulnerable) as (url, queried):
        done = subprocess.run(
            ["make", "--no-print-directory", "audit", f"AUDIT_OPTIONS=--osv-url {url} --cache-dir {tmp_path}"],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode == 0) is passes, done.stderr
    assert {"pyjwt", "starlette", "pyspark", "pyarrow"} <= queried
    assert ("PYSEC-0000-1" in done.stdout) is not passes
