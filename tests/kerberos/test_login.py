"""Tickets from a keytab or a cache: renewal, and an error with a hint for each failure."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from tests.kerberos.kdc import REALM, Realm, clock
from tms_core.errors import ConfigurationError, LoginFailed
from tms_core.security.kerberos import KerberosLogin
from tms_core.settings.models import KerberosSettings


def login(**wanted: object) -> KerberosLogin:
    return KerberosLogin("storage.hbase.kerberos", KerberosSettings.model_validate(wanted))


def failure(attempt: KerberosLogin, service: str = "hbase/localhost") -> str:
    """Return the error of a login, which must have a hint."""
    with pytest.raises(LoginFailed) as caught:
        attempt.exchange(service).step()
    assert caught.value.hint
    return str(caught.value)


@pytest.mark.usefixtures("service")
def test_keytab_without_principal_uses_its_first_principal(realm: Realm) -> None:
    one = login(keytab=realm.keytab("first", "second"))
    assert one.describe().startswith(f"first@{REALM}, ")
    assert one.exchange("hbase/localhost").step()


@pytest.mark.usefixtures("service")
def test_expired_ticket_is_renewed_with_the_keytab(realm: Realm) -> None:
    one = login(keytab=realm.keytab("short", options="-maxlife 2s"), principal="short")
    one.exchange("hbase/localhost").step()
    first = one.credentials().lifetime
    assert first is not None
    assert first <= 2
    # MIT's library reads the clock of the machine.
    time.sleep(3)
    assert one.exchange("hbase/localhost").step()
    assert (one.credentials().lifetime or 0) > 0


@pytest.mark.usefixtures("service")
def test_refilled_ticket_cache_is_read_again(realm: Realm) -> None:
    keytab = realm.keytab("cached")
    cache = realm.ticket(keytab, "cached", "-l", "1s")
    one = login(ticket_cache=cache)
    time.sleep(2)
    assert re.search(r"expired.*\(kinit PRINCIPAL\).* storage\.hbase\.kerberos\.keytab", failure(one))
    assert realm.ticket(keytab, "cached") == cache
    assert one.exchange("hbase/localhost").step()
    assert one.describe().startswith(f"cached@{REALM}")


def test_cache_without_ticket_is_reported(tmp_path: Path) -> None:
    message = failure(login(ticket_cache=f"FILE:{tmp_path}/none", principal="somebody"))
    assert re.search(r"no ticket.*\(kinit somebody\)", message)


def test_principal_unknown_to_the_realm_is_reported(realm: Realm) -> None:
    keytab = realm.keytab("gone")
    realm.admin("delprinc -force gone")
    message = failure(login(keytab=keytab, principal="gone"))
    assert "(storage.hbase.kerberos)" in message
    assert " gone" in message


def test_principal_missing_from_the_keytab_is_reported(realm: Realm) -> None:
    keytab = realm.keytab("present")
    message = failure(login(keytab=keytab, principal="absent"))
    assert re.search(rf"{keytab} .*absent.*\(klist -k {keytab}\)", message)


def test_outdated_key_is_reported(realm: Realm) -> None:
    keytab = realm.keytab("stale")
    realm.admin("cpw -randkey stale")
    assert "the realm has another key of stale. Create" in failure(login(keytab=keytab, principal="stale"))


def test_expired_principal_is_reported(realm: Realm) -> None:
    keytab = realm.keytab("old", options="-expire yesterday")
    assert "old has expired. Extend" in failure(login(keytab=keytab, principal="old"))


def test_service_unknown_to_the_realm_is_reported(realm: Realm) -> None:
    one = login(keytab=realm.keytab("curious"))
    service = f"hbase/elsewhere@{REALM}"
    assert service in failure(one, service)


def test_unreachable_realm_is_reported(tmp_path: Path) -> None:
    with Realm(tmp_path / "other") as other, pytest.MonkeyPatch.context() as patch:
        keytab = other.keytab("patient")
        other.stop()
        patch.setenv("KRB5_CONFIG", str(other.config))
        assert "kdc" in failure(login(keytab=keytab))


@pytest.mark.parametrize("shift", ["+2h", "-2h"])
@pytest.mark.parametrize("options", ["", "+requires_preauth"])
def test_wrong_clock_of_the_realm_is_reported(tmp_path: Path, shift: str, options: str) -> None:
    with Realm(tmp_path / "other") as other, pytest.MonkeyPatch.context() as patch:
        keytab = other.keytab("late", options=options)
        other.stop()
        other.start(clock(shift))
        # By default the library follows the realm's clock, and only a service notices the difference.
        other.config.write_text(other.config.read_text().replace("[libdefaults]", "[libdefaults]\n kdc_timesync = 0"))
        patch.setenv("KRB5_CONFIG", str(other.config))
        message = failure(login(keytab=keytab))
    assert "timedatectl" in message


@pytest.mark.parametrize("contents", [b"", b"\x05\x02", b"this is no keytab at all", None])
@pytest.mark.parametrize("principal", [None, "whole"])
def test_keytab_without_usable_key_is_reported(
    realm: Realm, tmp_path: Path, contents: bytes | None, principal: str | None
) -> None:
    keytab = tmp_path / "broken.keytab"
    keytab.touch(0o600)
    keytab.write_bytes(realm.keytab("whole").read_bytes()[:20] if contents is None else contents)
    message = failure(login(keytab=keytab, principal=principal))
    assert re.search(rf"{keytab} .*{principal or 'its principal'}.*\(klist -k {keytab}\)", message)


def test_unreadable_keytab_is_reported(realm: Realm) -> None:
    keytab = realm.keytab("private")
    one = login(keytab=keytab)
    keytab.chmod(0o000)
    user = os.geteuid()
    os.seteuid(65534 if user == 0 else user)
    try:
        message = failure(one)
        with pytest.raises(ConfigurationError, match=r"private\.keytab .*Permission denied"):
            login(keytab=keytab).exchange("hbase/localhost")
    finally:
        os.seteuid(user)
    assert f"storage.hbase.kerberos.keytab {keytab} cannot be read: Permission denied. Use" in message


@pytest.mark.parametrize("contents", [b"", b"this is no cache"])
def test_damaged_ticket_cache_is_reported(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "cache").write_bytes(contents)
    message = failure(login(ticket_cache=f"FILE:{tmp_path}/cache", principal="somebody"))
    assert re.search(r"cannot be used \(.*\(kinit somebody\)", message)


def test_malformed_principal_is_reported(realm: Realm) -> None:
    message = failure(login(keytab=realm.keytab("plain"), principal="one@two@three"))
    assert "one@two@three is not the name of a principal. Correct storage.hbase.kerberos.principal." in message


def test_login_succeeds_after_realm_outage(tmp_path: Path) -> None:
    with Realm(tmp_path / "other") as other, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KRB5_CONFIG", str(other.config))
        other.keytab("hbase/localhost")
        one = login(keytab=other.keytab("lasting", options="-maxlife 2s"))
        one.exchange("hbase/localhost").step()
        other.stop()
        # MIT's library reads the clock of the machine.
        time.sleep(3)
        assert "kdc" in failure(one)
        other.start()
        assert one.exchange("hbase/localhost").step()


def test_missing_or_public_keytab_is_rejected_at_startup(realm: Realm, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"storage\.hbase\.kerberos\.keytab .*none .*No such file"):
        login(keytab=tmp_path / "none")
    keytab = realm.keytab("open")
    keytab.chmod(0o644)
    with pytest.raises(ConfigurationError, match="can be read or written by other users"):
        login(keytab=keytab)


def test_keytab_deleted_after_startup_is_reported(realm: Realm) -> None:
    keytab = realm.keytab("moved")
    one = login(keytab=keytab)
    keytab.unlink()
    assert f"storage.hbase.kerberos.keytab {keytab} cannot be read: No such file" in failure(one)
