"""Java's HttpClient, which proposes HTTP/2, with ``tms serve``."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.server.conftest import serving
from tests.support import PATIENCE_SECONDS, require_or_skip, require_tool

PROGRAM = Path(__file__).with_name("Upgrade.java")
#: The first JDK with this client, and with programs that run from source.
JDK = 11


def test_java_http_client_proposing_http2_reads_each_response() -> None:
    java = require_tool("java", "apt-get install openjdk-17-jdk-headless")
    require_tool("javac", "apt-get install openjdk-17-jdk-headless")  # java compiles the program in memory
    version = subprocess.run(
        [java, "-XshowSettings:properties", "-version"], capture_output=True, text=True, check=True
    )
    [major] = [line.split("=")[1] for line in version.stderr.splitlines() if "java.specification.version =" in line]
    if float(major) < JDK:
        require_or_skip(f"java is older than {JDK}; install a newer one: apt-get install openjdk-17-jdk-headless")
    with serving() as server:
        topic = f"http://127.0.0.1:{server.port}/v1/namespaces/default/topics/proposed"
        done = subprocess.run(
            [java, "-Xmx64m", str(PROGRAM), topic], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
        )
    created, described, published, polled = (line.split(" ", 1) for line in done.stdout.strip().split("\n", 3))
    assert (created[0], published[0]) == ("200", "200")
    assert (described[0], json.loads(described[1])["ttl"]) == ("200", "60")
    assert (polled[0], [message["payload"] for message in json.loads(polled[1])]) == ("200", ["hello"])
