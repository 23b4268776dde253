"""A complete Kubernetes node: the control plane, and a kubelet with containerd.

Start it with :func:`run_in_namespaces`: bridges, packet filters, mounts and processes
disappear with the namespaces. Settings that the kubelet changes for the whole machine are restored.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import yaml

from tests.chart.programs import program
from tests.cluster.engine import PACKAGES, Engine
from tests.cluster.plane import KUBEBOX, ROOT, ControlPlane, until
from tests.support import require_or_skip, require_tool

#: The node's address, on a bridge inside the namespace.
ADDRESS = "10.88.77.1"
SUBNET = "10.88.77.0/24"
#: The time limit of a module on a node, in seconds.
LIFE_SECONDS = 1500
#: The kernel settings that the kubelet changes for the whole machine.
SYSCTLS = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")

CONTAINERD = """\
version = 2
root = "{folder}/containerd"
state = "{folder}/containerd-state"
[grpc]
address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "localhost/pause:local"
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{packages}/usr/lib/cni"
conf_dir = "{folder}/cni"
"""


def run_in_namespaces(module: str, folder: Path, images: Path, *words: object) -> dict[str, Any]:
    """Run a module in new namespaces, where it can start a node; return its observations, which are its last line.

    Skip the test by :func:`require_or_skip` if this machine lacks a requirement.
    """
    program("kubebox", "kubebox")
    program("helm")
    for tool in ("unshare", "ip", "openssl"):
        require_tool(tool, "apt-get install util-linux iproute2 openssl")
    if os.geteuid() != 0 or not (PACKAGES / "usr/bin/containerd").exists():
        require_or_skip("a node needs root and Debian's containerd: make engine")
    namespaces = ["unshare", "--net", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    command = [*namespaces, sys.executable, "-m", module, *map(str, [folder, images, *words])]
    with restored_machine():
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIFE_SECONDS, check=False)
    # The packed and unpacked images are gigabytes.
    images.unlink()
    shutil.rmtree(folder / "containerd")
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Node(ControlPlane):
    """A Kubernetes node that runs until the block ends.

    Args:
        folder: a folder for its files.
        images: an archive of images from ``docker save``, including ``localhost/pause:local``.
    """

    def __init__(self, folder: Path, images: Path) -> None:
        super().__init__(folder, ADDRESS)
        self._images = images
        self._names: NameServer | None = None

    def __enter__(self) -> Self:
        _network()
        super().__enter__()
        self._names = NameServer(self)
        self._containerd()
        self._kubelet()
        kubeconfig = f"--kubeconfig={self.kubeconfig}"
        self._start(
            "kube-scheduler",
            kubeconfig,
            f"--authentication-kubeconfig={self.kubeconfig}",
            f"--authorization-kubeconfig={self.kubeconfig}",
            "--leader-elect=false",
            "--secure-port=0",
        )
        self._start(
            "kube-proxy",
            kubeconfig,
            "--hostname-override=node1",
            "--proxy-mode=iptables",
            f"--cluster-cidr={SUBNET}",
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
            "--healthz-bind-address=127.0.0.1:10256",
            "--metrics-bind-address=127.0.0.1:10249",
        )
        until(self._has_a_node, "the node is ready", self.read_output)
        return self

    def _has_a_node(self) -> bool:
        for node in self.get("/api/v1/nodes")["items"]:
            conditions = {each["type"]: each["status"] for each in node["status"]["conditions"]}
            if conditions.get("Ready") == "True":
                return True
        return False

    def _containerd(self) -> None:
        config = self._folder / "containerd.toml"
        config.write_text(CONTAINERD.format(folder=self._folder, packages=PACKAGES))
        cni = self._folder / "cni"
        cni.mkdir()
        route = [{"dst": "0.0.0.0/0"}]
        ipam = {
            "type": "host-local",
            "ranges": [[{"subnet": SUBNET, "rangeStart": "10.88.77.10", "gateway": ADDRESS}]],
            "routes": route,
            "dataDir": str(self._folder / "ipam"),
        }
        bridge = {"type": "bridge", "bridge": "cni-tms", "isGateway": True, "hairpinMode": True, "ipam": ipam}
        network = {"cniVersion": "0.4.0", "name": "tms", "plugins": [bridge, {"type": "loopback"}]}
        (cni / "10-tms.conflist").write_text(json.dumps(network))
        self._spawn("containerd", "containerd", "-c", str(config))
        ctr = ["ctr", "-a", str(self._folder / "containerd.sock"), "-n", "k8s.io"]

        def answers() -> bool:
            return subprocess.run([*ctr, "version"], env=self.environ, capture_output=True, check=False).returncode == 0

        until(answers, "containerd answers", self.read_output)
        subprocess.run([*ctr, "images", "import", str(self._images)], env=self.environ, check=True, capture_output=True)

    def _kubelet(self) -> None:
        settings = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "failSwapOn": False,
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "localStorageCapacityIsolation": False,
            "makeIPTablesUtilChains": False,
            "containerRuntimeEndpoint": f"unix://{self._folder}/containerd.sock",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "address": ADDRESS,
            "readOnlyPort": 0,
            "healthzPort": 0,
            "clusterDNS": [ADDRESS],
            "clusterDomain": "cluster.local",
            "evictionHard": {"memory.available": "100Mi"},
        }
        config = self._folder / "kubelet.yaml"
        config.write_text(yaml.safe_dump(settings))
        self._start(
            "kubelet",
            f"--config={config}",
            f"--kubeconfig={self.kubeconfig}",
            f"--root-dir={self._folder / 'kubelet'}",
            f"--cert-dir={self._folder / 'pki'}",
            "--hostname-override=node1",
            f"--node-ip={ADDRESS}",
        )

    @property
    def environ(self) -> dict[str, str]:
        return Engine(self._folder).environ | {"XTABLES_LIBDIR": f"{PACKAGES}/usr/lib/x86_64-linux-gnu/xtables"}

    def kubectl(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(KUBEBOX), "kubectl", "--kubeconfig", str(self.kubeconfig), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


class NameServer:
    """A name server for the names of Services, which it looks up in the API server."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((ADDRESS, 53))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            question, client = self._socket.recvfrom(4096)
            self._socket.sendto(self._answer(question), client)

    def _answer(self, question: bytes) -> bytes:
        labels, at = [], 12
        while question[at]:
            labels.append(question[at + 1 : at + 1 + question[at]].decode())
            at += question[at] + 1
        (kind,) = struct.unpack(">H", question[at + 1 : at + 3])
        queried = question[12 : at + 5]
        address = self._address(labels) if kind == 1 else None
        if address is None:
            # The name exists but has no record of this kind, or it does not exist.
            code = 0x8180 if kind != 1 and self._address(labels) else 0x8183
            return question[:2] + struct.pack(">HHHHH", code, 1, 0, 0, 0) + queried
        record = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 5, 4) + socket.inet_aton(address)
        return question[:2] + struct.pack(">HHHHH", 0x8180, 1, 1, 0, 0) + queried + record

    def _address(self, labels: list[str]) -> str | None:
        if labels[2:] != ["svc", "cluster", "local"]:
            return None
        found = self._plane.request("GET", f"/api/v1/namespaces/{labels[1]}/services/{labels[0]}")
        return str(found.json()["spec"]["clusterIP"]) if found.status_code == 200 else None


def _network() -> None:
    """Set up the loopback, a bridge for pods, and a mount for their network namespaces."""
    for line in (
        "ip link set lo up",
        "ip link add cni-tms type bridge",
        f"ip addr add {ADDRESS}/24 dev cni-tms",
        "ip link set cni-tms up",
        "mkdir -p /run/netns",
        "mount -t tmpfs none /run/netns",
    ):
        subprocess.run(line.split(), check=True)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    _link_packet_filters()


def _link_packet_filters() -> None:
    """Create the links to the program that implements all iptables commands, like Debian's package scripts."""
    for name in ("iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore"):
        link = PACKAGES / "usr/sbin" / name
        if not link.exists():
            link.symlink_to("xtables-nft-multi")


@contextmanager
def restored_machine() -> Iterator[None]:
    """Restore the settings that a kubelet changes for the whole machine, after its processes have ended."""
    files = [Path("/proc/sys") / name for name in SYSCTLS]
    before = [file.read_text() for file in files]
    try:
        yield
    finally:
        for file, text in zip(files, before, strict=True):
            file.write_text(text)
        until(_remove_groups, "the pods' control groups are removed")


def _remove_groups() -> bool:
    """Remove the pods' control groups, deepest first; return False while a process keeps one of them."""
    groups = sorted(Path("/sys/fs/cgroup").glob("*/k8s.io/**/"), key=lambda path: -len(path.parts))
    for group in groups:
        with suppress(OSError):
            group.rmdir()
    return not list(Path("/sys/fs/cgroup").glob("*/k8s.io"))
