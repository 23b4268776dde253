"""Fixtures of a Kerberos realm for a test process, and of the environment in which MIT's library finds the realm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kerberos.kdc import Realm


@pytest.fixture(scope="session")
def realm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Realm]:
    from tests.kerberos.kdc import Realm  # noqa: PLC0415 the import skips the test, not this file

    with Realm(tmp_path_factory.mktemp("realm")) as realm:
        yield realm


@pytest.fixture(scope="module")
def service(realm: Realm) -> Path:
    return realm.keytab("hbase/localhost")


@pytest.fixture(scope="module")
def keytab(realm: Realm) -> Path:
    return realm.keytab("janitor")


@pytest.fixture(autouse=True)
def _environment(realm: Realm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KRB5_CONFIG", str(realm.config))
    monkeypatch.setenv("KRB5RCACHENAME", "none:")
    monkeypatch.delenv("KRB5CCNAME", raising=False)
