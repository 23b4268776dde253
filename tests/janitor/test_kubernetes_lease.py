"""The lease in Kubernetes: taken, renewed, lost and fenced, against a small API server that keeps versions.

The same against a real one: ``tests/cluster/test_plane.py``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from janitor.cli import lease as leases
from janitor.kubernetes_lease import RECORD, KubernetesCell, Mirrored
from janitor.state.sqlite import SqliteState
from tests.builders import DAY, NOW_MS, SECOND
from tests.janitor.cli.conftest import Site, site
from tms_core.clock import ManualClock
from tms_core.errors import ConfigurationError, LeaseHeld, LeaseLost, StoreError
from tms_core.lease import Lease, LeaseRecord

__all__ = ["site"]  # a fixture

PATH = "/apis/coordination.k8s.io/v1/namespaces/apps/leases"


class Api:
    """An API server of one namespace's leases: what it holds, and how it answers.

    Attributes:
        leases: by name.
        refusal: the status of every answer; 0: as it should be.
        before_write: called before a write is looked at.
    """

    def __init__(self) -> None:
        self.leases: dict[str, dict[str, Any]] = {}
        self.refusal = 0
        self.before_write: Callable[[], None] = lambda: None
        self._version = 0
        api = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self, status: int, body: object) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def respond(self) -> None:
                length = int(self.headers.get("content-length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                self.answer(*api.ask(self.command, self.path, body))

            do_GET = do_POST = do_PUT = respond  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def ask(self, method: str, path: str, body: Any) -> tuple[int, object]:
        """One request."""
        if self.refusal:
            return self.refusal, {"message": "this was refused"}
        name = path.removeprefix(PATH).strip("/")
        if method != "GET":
            before, self.before_write = self.before_write, lambda: None
            before()
        present = self.leases.get(name)
        times = [value for name, value in (body or {}).get("spec", {}).items() if name.endswith("Time")]
        if any(not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)", value) for value in times):
            return 400, {"message": "a time without microseconds"}
        if method == "POST":
            name = body["metadata"]["name"]
            return (409, {}) if name in self.leases else (201, self.keep(name, body))
        if present is None:
            return 404, {"message": "not found"}
        if method == "GET":
            return 200, present
        if body["metadata"]["resourceVersion"] != present["metadata"]["resourceVersion"]:
            return 409, {"message": "the object has been modified"}
        return 200, self.keep(name, body)

    def keep(self, name: str, lease: dict[str, Any]) -> dict[str, Any]:
        """Keep a lease at its next version."""
        self._version += 1
        lease["metadata"]["resourceVersion"] = str(self._version)
        self.leases[name] = lease
        return lease

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """A cluster, as ``KUBECONFIG`` names it."""
    with closing(Api()) as made:
        file = tmp_path / "kubeconfig"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": made.url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        file.write_text(yaml.safe_dump(document))
        monkeypatch.setenv("KUBECONFIG", str(file))
        yield made


@pytest.fixture
def cell(api: Api) -> Iterator[KubernetesCell]:  # noqa: ARG001 - there has to be one
    with closing(KubernetesCell("janitor", "apps")) as made:
        yield made


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS, running_ms=DAY)


def lease(cell: Any, holder: str, clock: ManualClock) -> Lease:
    return Lease(cell, holder, 60, clock)


def test_given_no_lease_when_it_is_taken_then_it_is_made_and_people_see_who_has_it(
    api: Api, cell: KubernetesCell, clock: ManualClock
) -> None:
    one = lease(cell, "one", clock)
    one.acquire()
    spec = api.leases["janitor"]["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("one", 60, 1)
    assert spec["renewTime"] == spec["acquireTime"]
    one.check()


def test_given_a_lease_of_the_charts_that_nobody_has_then_it_is_taken_as_it_is(
    api: Api, cell: KubernetesCell, clock: ManualClock
) -> None:
    api.keep("janitor", {"metadata": {"name": "janitor", "labels": {"a": "b"}}})
    lease(cell, "one", clock).acquire()
    assert api.leases["janitor"]["metadata"]["labels"] == {"a": "b"}
    assert json.loads(api.leases["janitor"]["metadata"]["annotations"][RECORD])["holder"] == "one"


def test_given_a_holder_when_it_renews_then_another_one_waits_until_it_has_seen_nothing_for_that_long(
    api: Api, cell: KubernetesCell, clock: ManualClock
) -> None:
    one, two = lease(cell, "one", clock), lease(cell, "two", clock)
    one.acquire()
    with pytest.raises(LeaseHeld, match="one has the lease"):
        two.acquire()
    clock.advance(40 * SECOND)
    one.check()
    acquired, renewed = (api.leases["janitor"]["spec"][name] for name in ("acquireTime", "renewTime"))
    assert acquired < renewed
    clock.advance(40 * SECOND)
    with pytest.raises(LeaseHeld):
        two.acquire()
    clock.advance(61 * SECOND)
    two.acquire()
    assert two.fence == 2
    with pytest.raises(LeaseLost, match="two has it now"):
        one.check()


def test_given_two_that_take_it_at_the_same_moment_then_one_of_them_has_it(
    api: Api, cell: KubernetesCell, clock: ManualClock
) -> None:
    one, two = lease(cell, "one", clock), lease(cell, "two", clock)
    for _ in range(2):
        api.before_write = two.acquire
        with pytest.raises(LeaseHeld, match="at this moment"):
            one.acquire()
        assert two.held
        two.release()
    assert api.leases["janitor"]["spec"].get("holderIdentity") is None


def test_given_a_lease_that_was_removed_then_its_holder_has_lost_it(
    api: Api, cell: KubernetesCell, clock: ManualClock
) -> None:
    one = lease(cell, "one", clock)
    one.acquire()
    api.leases.clear()
    with pytest.raises(LeaseLost):
        one.check()


def test_given_an_annotation_that_is_no_record_then_it_is_nobodys(
    api: Api, cell: KubernetesCell, clock: ManualClock
) -> None:
    api.keep("janitor", {"metadata": {"name": "janitor", "annotations": {RECORD: "nonsense"}}})
    lease(cell, "one", clock).acquire()
    assert cell.swap_lease(cell.lease(), b"nonsense again")
    assert cell.lease() == b"nonsense again"


@pytest.mark.parametrize(("status", "hint"), [(403, "Role and RoleBinding"), (500, "health")])
def test_given_a_refusal_then_it_says_what_was_refused_and_what_to_do(
    api: Api, cell: KubernetesCell, status: int, hint: str
) -> None:
    api.refusal = status
    with pytest.raises(StoreError, match="refused the lease apps/janitor: this was refused") as caught:
        cell.lease()
    assert hint in caught.value.hint


def test_given_no_api_server_then_it_says_so(api: Api, cell: KubernetesCell) -> None:
    api.close()
    with pytest.raises(StoreError, match="did not answer for the lease apps/janitor"):
        cell.lease()


def test_given_an_answer_that_is_no_json_then_its_status_is_said(
    api: Api, cell: KubernetesCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "ask", lambda *_: (502, ["a proxy"]))
    with pytest.raises(StoreError, match="502 Bad Gateway"):
        cell.lease()


@pytest.mark.usefixtures("api")
def test_a_pod_knows_its_namespace_and_others_have_to_say_it(tmp_path: Path) -> None:
    file = tmp_path / "namespace"
    with pytest.raises(ConfigurationError, match="nobody knows in which namespace"):
        KubernetesCell("janitor", None, file)
    file.write_text("apps\n")
    with closing(KubernetesCell("janitor", None, file)) as cell:
        assert cell.lease() is None


@pytest.mark.parametrize("environ", [{"KUBECONFIG": "/nowhere"}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}])
def test_given_neither_a_pods_token_nor_a_kubeconfig_then_the_cluster_is_not_known(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="the cluster is not known"):
        KubernetesCell("janitor", "apps", environ=environ)


# --- the memory is told ----------------------------------------------------------------------------------------------


def test_given_a_new_holder_then_the_memory_knows_it_and_a_former_one_cannot_take_that_back(
    cell: KubernetesCell, clock: ManualClock
) -> None:
    with SqliteState.in_memory() as state:
        one, two = (lease(Mirrored(cell, state), name, clock) for name in ("one", "two"))
        one.acquire()
        before = cell.lease()
        assert state.lease() == before
        assert before is not None
        two.acquire(sole=True)
        assert state.lease() == cell.lease() != before

        class Late:
            """A place where a former holder's write had been done, and told of only now."""

            def lease(self) -> bytes | None:
                return cell.lease()

            def swap_lease(self, *_: object) -> bool:
                return True

        assert Mirrored(Late(), state).swap_lease(None, before)
        assert state.lease() == cell.lease()


def test_given_a_memory_with_a_higher_fence_from_before_then_the_holder_in_kubernetes_is_told_of_all_the_same(
    cell: KubernetesCell, clock: ManualClock
) -> None:
    with SqliteState.in_memory() as state:
        assert state.swap_lease(None, LeaseRecord("old", 57, 0, 0, 60).pack())
        lease(Mirrored(cell, state), "one", clock).acquire()
        assert state.lease() == cell.lease()


def test_given_a_write_that_is_refused_then_the_memory_is_not_told(cell: KubernetesCell) -> None:
    with SqliteState.in_memory() as state:
        assert not Mirrored(cell, state).swap_lease(b"another", LeaseRecord("one", 1, 0, 0, 60).pack())
        assert state.lease() is None


# --- the command line ------------------------------------------------------------------------------------------------

SETTINGS = """\
storage: {kind: leveldb, leveldb: {path: data/messaging}}
transactions: {source: none}
janitor: {state: data/janitor, lease: {kind: kubernetes, name: janitor, namespace: apps}}
"""


def test_given_the_settings_want_it_then_a_run_holds_the_lease_and_gives_it_back(site: Site, api: Api) -> None:
    site.set(SETTINGS)
    held: list[object] = []
    api.before_write = lambda: held.append(dict(api.leases))
    assert site.janitor("run --once --adopt").code == 0
    assert held
    assert api.leases["janitor"]["spec"]["leaseTransitions"] == 1
    assert api.leases["janitor"]["spec"].get("holderIdentity") is None


def test_given_kubernetes_is_not_installed_then_the_settings_are_wrong(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.set(SETTINGS)
    monkeypatch.setattr(leases, "find_spec", lambda _: None)
    outcome = site.janitor("run --once")
    assert outcome.code == 2
    assert "tms-janitor[kubernetes]" in outcome.err


def test_the_library_is_loaded_by_nobody_who_does_not_want_it() -> None:
    code = "import sys, janitor.cli.main; sys.exit('kubernetes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
