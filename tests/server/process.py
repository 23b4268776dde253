"""``tms serve`` in a separate process, on free ports, with a store in the test's folder."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from tests.support import PATIENCE_SECONDS

TMS = Path(sys.executable).with_name("tms")
#: The environment of a server in this process, with a store in memory and free ports.
IN_MEMORY = {"TMS_STORAGE__KIND": "memory", "TMS_SERVER__PORT": "0", "TMS_TRANSACTIONS__THRIFT": "127.0.0.1:0"}


def configure(folder: Path, *, thrift_port: object = 0, **server: Any) -> Path:
    """Write a settings file for a store in ``folder``; ports are free ports unless the arguments set them."""
    path = folder / "tms.yaml"
    settings = {
        "storage": {"leveldb": {"path": str(folder / "messaging")}},
        "transactions": {"directory": str(folder / "tx"), "thrift": f"127.0.0.1:{thrift_port}"},
        "server": {"port": 0, **server},
        "janitor": {"every_seconds": 1, "hold_seconds": 0, "state": str(folder / "state"), "http": {"port": 0}},
    }
    path.write_text(yaml.safe_dump(settings))
    return path


class Serve:
    """A running ``tms serve``.

    Args:
        config: the settings file.
        options: additional arguments of the command.
        janitor: whether the server has the embedded janitor.
        tms: the command line of ``tms``.
        environment: the environment of the process; None: the environment of this process.
    """

    def __init__(
        self,
        config: Path,
        *options: str,
        janitor: bool = False,
        tms: Sequence[str] = (str(TMS),),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = config.with_suffix(".log").open("a+")
        before = len(self.log)
        command = [*tms, "serve", "--config", str(config), *options, *([] if janitor else ["--no-janitor"])]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment)
        assert self.process.stdout is not None
        addresses = {}
        for line in self.process.stdout:
            name, _, address = line.strip().partition(": ")
            addresses[name] = address
            if name == "REST":
                break
        else:
            log = self.log[before:]
            self.__exit__()
            raise AssertionError(f"the server did not start: {log}")
        self.url = addresses["REST"]
        self.transactions = addresses.get("transactions", "")

    @property
    def port(self) -> int:
        return port_of(self.url)

    @property
    def transactions_port(self) -> int:
        return port_of(self.transactions)

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def ask_to_end(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self.process.wait(timeout=PATIENCE_SECONDS)

    def end(self) -> None:
        self.ask_to_end()
        assert self.wait() == 0, self.log

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()


def port_of(address: str) -> int:
    match = re.search(r":(\d+)$", address)
    assert match is not None, address
    return int(match[1])
