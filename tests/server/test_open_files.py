"""The limit of open files of a server."""

from __future__ import annotations

from pathlib import Path

from tests.server.process import TMS, Serve, configure


def test_serve_raises_the_soft_limit_of_open_files_to_the_hard(tmp_path: Path) -> None:
    shell = ("sh", "-c", 'ulimit -S -n 128; exec "$0" "$@"', str(TMS))
    with Serve(configure(tmp_path), tms=shell) as server:
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
        [line] = [line for line in limits.splitlines() if line.startswith("Max open files")]
        soft, hard = line.split()[3:5]
        assert soft == hard != "128"
        server.end()
