"""A Kerberos realm for tests: MIT's KDC on a loopback port, from Debian's packages unpacked inside the tree.

``make kerberos`` unpacks them and compiles gssapi against them. A realm starts in less than a second.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.support import free_port, is_listening, require_or_skip

REALM = "TEST.REALM"
_ROOT = Path(__file__).parents[2] / ".tools/krb5/usr"
_START_SECONDS = 60


if not (_ROOT / "sbin/krb5kdc").exists() or importlib.util.find_spec("gssapi") is None:
    require_or_skip("a KDC and gssapi are missing; build them: make kerberos (Debian, needs gcc and python3-dev)")
#: gssapi for the simulated services; a module that imports it is skipped if it is missing.
gssapi: Any = importlib.import_module("gssapi")


def clock(shift: str) -> dict[str, str]:
    """Return the environment variables that shift the clock of a process, for example by ``+2h``."""
    found = next(_ROOT.glob("lib/*/faketime/libfaketime.so.1"), None)
    if found is None:
        require_or_skip("libfaketime is missing; unpack it: make kerberos (Debian)")
    return {"LD_PRELOAD": str(found), "FAKETIME": shift}


class Realm:
    """A KDC with its principals."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._port = free_port()
        self.config = folder / "krb5.conf"
        [library] = {path.parent for path in _ROOT.glob("lib/*/libkdb5.so.10")}
        self.config.write_text(
            f"[libdefaults]\n default_realm = {REALM}\n dns_lookup_kdc = false\n dns_lookup_realm = false\n"
            " dns_canonicalize_hostname = false\n rdns = false\n udp_preference_limit = 1\n"
            f"[realms]\n {REALM} = {{\n  kdc = 127.0.0.1:{self._port}\n }}\n[domain_realm]\n localhost = {REALM}\n"
            f"[dbmodules]\n db_module_dir = {library}/krb5/plugins/kdb\n[logging]\n kdc = FILE:{folder}/kdc.log\n"
        )
        (folder / "kdc.conf").write_text(
            f"[kdcdefaults]\n kdc_listen = 127.0.0.1:{self._port}\n kdc_tcp_listen = 127.0.0.1:{self._port}\n"
            f"[realms]\n {REALM} = {{\n  database_name = {folder}/principal\n  key_stash_file = {folder}/stash\n"
            f"  acl_file = {folder}/acl\n  max_life = 1d\n }}\n"
        )
        self.environ = {
            **os.environ,
            "KRB5_CONFIG": str(self.config),
            "KRB5_KDC_PROFILE": str(folder / "kdc.conf"),
            "LD_LIBRARY_PATH": str(library),
        }
        self._run("sbin/kdb5_util", "create", "-s", "-P", "secret", "-r", REALM)
        self._kdc: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self, environ: Mapping[str, str] | None = None) -> None:
        self._kdc = subprocess.Popen(
            [_ROOT / "sbin/krb5kdc", "-n"],
            env={**self.environ, **(environ or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            if is_listening(self._port):
                return
            assert self._kdc.poll() is None, (self._folder / "kdc.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def stop(self) -> None:
        if self._kdc is not None:
            self._kdc.terminate()
            self._kdc.wait()
            self._kdc = None

    def admin(self, query: str) -> None:
        self._run("sbin/kadmin.local", "-q", query)

    def keytab(self, *principals: str, options: str = "") -> Path:
        """Create principals with options of ``addprinc``, and return a keytab with their keys."""
        path = self._folder / f"{principals[0].replace('/', '-')}.keytab"
        for principal in principals:
            self.admin(f"addprinc -randkey {options} {principal}")
            self.admin(f"ktadd -k {path} {principal}")
        path.chmod(0o600)
        return path

    def ticket(self, keytab: Path, principal: str, *options: str) -> str:
        """Run ``kinit`` with a new ticket cache, and return the name of the cache."""
        cache = f"FILE:{self._folder / principal.replace('/', '-')}.cache"
        self._run("bin/kinit", "-c", cache, "-k", "-t", str(keytab), *options, principal)
        return cache

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self, program: str, *words: str) -> None:
        done = subprocess.run([_ROOT / program, *words], env=self.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
