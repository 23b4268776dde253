"""A real control plane on this machine: etcd, API server and controller manager, on loopback, without root.

The API server validates objects, controllers create objects, and leases work as on any cluster. Pods stay pending,
because there is no node.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx2
import yaml

ROOT = Path(__file__).parents[2]
KUBEBOX = ROOT / ".tools/bin/kubebox"
#: The time after which a wait fails, in seconds; long, because the machine may be busy.
PATIENCE_SECONDS = 400


def until(condition: Callable[[], bool], expected: str, describe: Callable[[], str] = str) -> None:
    """Wait until a condition is true; after the time limit, fail with the expected event and a description."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_SECONDS} s: {expected}\n{describe()}"
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class ControlPlane:
    """A control plane that runs until the block ends."""

    def __init__(self, folder: Path, address: str = "127.0.0.1") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._token = secrets.token_hex(16)
        client, peer, secure = free_ports(3)
        self._address = address
        self.url = f"https://{address}:{secure}"
        self.kubeconfig = folder / "kubeconfig"
        self._etcd_url, self._peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        self._secure = secure
        self._processes: list[subprocess.Popen[bytes]] = []
        self._http: httpx2.Client | None = None

    @property
    def authority(self) -> Path:
        return self._folder / "certs/apiserver.crt"

    @property
    def environ(self) -> dict[str, str]:
        return dict(os.environ)

    def _start(self, *words: str) -> None:
        self._spawn(words[0], str(KUBEBOX), *words)

    def _spawn(self, name: str, *command: str) -> None:
        with (self._folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log, env=self.environ)
        self._processes.append(process)

    def __enter__(self) -> Self:
        key = self._folder / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        tokens = self._folder / "tokens.csv"
        tokens.write_text(f"{self._token},admin,1,system:masters\n")
        try:
            self._start("etcd", str(self._folder / "etcd"), self._etcd_url, self._peer_url)
            self._start(
                "kube-apiserver",
                f"--etcd-servers={self._etcd_url}",
                f"--secure-port={self._secure}",
                f"--bind-address={self._address}",
                f"--advertise-address={self._address}",
                f"--endpoint-reconciler-type={'none' if self._address == '127.0.0.1' else 'lease'}",
                "--kubelet-preferred-address-types=InternalIP",
                "--allow-privileged=true",
                "--cert-dir=certs",
                f"--service-account-key-file={key}",
                f"--service-account-signing-key-file={key}",
                "--service-account-issuer=https://kubernetes.default.svc",
                "--service-cluster-ip-range=10.96.0.0/24",
                "--authorization-mode=RBAC",
                f"--token-auth-file={tokens}",
            )
            until(self.authority.exists, "the API server has made its certificate")
            self.kubeconfig.write_text(yaml.safe_dump(self.config(self._token)))
            self._http = httpx2.Client(
                base_url=self.url,
                verify=ssl.create_default_context(cafile=str(self.authority)),
                headers={"authorization": f"Bearer {self._token}"},
                timeout=PATIENCE_SECONDS,
                trust_env=False,
            )
            until(self._is_ready, "the API server is ready")
            self._start(
                "kube-controller-manager",
                f"--kubeconfig={self.kubeconfig}",
                f"--service-account-private-key-file={key}",
                f"--root-ca-file={self.authority}",
                "--leader-elect=false",
                "--controllers=*",
                "--cert-dir=certs",
                "--secure-port=0",
            )
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self._http is not None:
            self._http.close()
        # Stop the API server before its etcd, or it hangs.
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(timeout=PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def config(self, token: str) -> dict[str, Any]:
        """Return a kubeconfig for the owner of a token."""
        cluster = {"server": self.url, "certificate-authority": str(self.authority)}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }

    def _is_ready(self) -> bool:
        for process in self._processes:
            assert process.poll() is None, self.read_output()
        assert self._http is not None
        try:
            return self._http.get("/readyz").status_code == 200
        except httpx2.TransportError:
            return False

    def read_output(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self._folder.glob("*.log"))

    def request(self, method: str, path: str, body: object = None, token: str | None = None) -> httpx2.Response:
        """Send a request to the API server, as an administrator or the owner of another token."""
        assert self._http is not None
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return self._http.request(method, path, json=body, headers=headers)

    def get(self, path: str) -> Any:
        answer = self.request("GET", path)
        assert answer.status_code == 200, answer.text
        return json.loads(answer.content)

    def create(self, path: str, body: object) -> Any:
        answer = self.request("POST", path, body)
        assert answer.status_code == 201, answer.text
        return json.loads(answer.content)

    def named(self, path: str) -> list[str]:
        return [item["metadata"]["name"] for item in self.get(path)["items"]]
