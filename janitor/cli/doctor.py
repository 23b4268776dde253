"""``janitor doctor``: checks of the preconditions of a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import click

from janitor.cli import render
from janitor.cli.options import common_options, session
from janitor.run import guards
from janitor.state.base import RunRecord, StoreRecord
from janitor.sweep import transactions as txstate
from tms_core.cli.help import Command
from tms_core.errors import ConfigurationError, StoreUnavailable, TmsError
from tms_core.logs.printable import complete, duration
from tms_core.security.files import check_file

if TYPE_CHECKING:
    from janitor.app.place import Place
    from janitor.app.session import Session
    from tms_core.clock import Clock
    from tms_core.settings.models import (
        AuthSettings,
        ClientTlsSettings,
        HBaseSettings,
        KerberosSettings,
        TlsSettings,
    )

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
#: The share of free disk space below which a compaction may fail.
_FREE_SHARE = 0.05


class Finding(NamedTuple):
    """The result of a check, and a sentence with the reason or the next step."""

    check: str
    status: Literal["ok", "warn", "fail"]
    message: str


@click.command("doctor", cls=Command)
@common_options
def command() -> int:
    """Check the preconditions of a run.

    The command checks settings, store and permissions, state, snapshots, clocks and disk. The exit code
    is 1 if a check fails.

    \b
    Example:
      janitor doctor --config janitor.yaml
    """
    current = session()
    findings = [one._replace(message=complete(one.message, current.arguments())) for one in examine(current)]
    if current.as_json:
        render.print_json([finding._asdict() for finding in findings])
    else:
        table = render.grid(["check", "", ""])
        for finding in findings:
            table.add_row(finding.check, render.styled(finding.status, _STYLES[finding.status]), finding.message)
        render.print_table(table)
    return 1 if any(finding.status == "fail" for finding in findings) else 0


def examine(current: Session) -> Iterator[Finding]:
    """Yield the results of all checks."""
    sources = sorted(set(current.loaded.origins.values()))
    yield Finding("settings", "ok", f"from {', '.join(sources)}" if sources else "all defaults")
    is_down = False
    try:
        yield _store(current)
    except TmsError as error:
        # Skip further checks of HBase, which would also wait for the timeout.
        is_down = isinstance(error, StoreUnavailable) and not current.place.exclusive
        yield Finding("store", "fail", str(error))
    for name, check in (
        ("state", _state),
        ("snapshots", _snapshots),
        ("clock", _clock),
        ("lifetime", _lifetime),
        ("disk", _disk),
    ):
        is_skipped = is_down and name in ("state", "clock")
        yield _skip_check(name) if is_skipped else _run_check(name, partial(check, current))
    yield from _check_optional(current)
    yield _spark()
    if current.place.exclusive:
        yield _leveldb()
        return
    for name, check_place in (("cdap", _cdap), ("tables", _tables), ("regions", _regions)):
        yield _skip_check(name) if is_down else _run_check(name, partial(check_place, current.place))


def _check_optional(current: Session) -> Iterator[Finding]:
    """Yield the checks of features that are off by default."""
    settings = current.settings
    hbase, transactions, auth = settings.storage.hbase, settings.transactions, settings.server.auth
    is_on_hbase = settings.storage.kind == "hbase"
    if settings.janitor.archive.enabled:
        yield _run_check("archive", partial(_archive, current))
    if settings.janitor.boundary.feedback:
        yield _run_check("feedback", partial(_feedback, current))
    if is_on_hbase and hbase.tls is not None:
        yield _run_check("hbase tls", partial(_hbase_tls, hbase, hbase.tls))
    if is_on_hbase and hbase.kerberos is not None:
        yield _run_check("hbase kerberos", partial(_login, "hbase kerberos", "storage.hbase.kerberos", hbase.kerberos))
    if transactions.kerberos is not None:
        yield _run_check(
            "hdfs kerberos", partial(_login, "hdfs kerberos", "transactions.kerberos", transactions.kerberos)
        )
    if files := _named_files(current):
        yield _files(files)
    if settings.server.tls is not None:
        yield _run_check("tls", partial(_certificate, "tls", "server.tls", settings.server.tls))
    if transactions.tls is not None:
        yield _run_check(
            "transaction tls", partial(_certificate, "transaction tls", "transactions.tls", transactions.tls)
        )
    if auth.kind != "none":
        yield _run_check("auth", partial(_auth, auth, current.clock))


def _archive(current: Session) -> Finding:
    """Check that pyarrow is installed, and that the folder is writable and has space."""
    current.archive()
    folder = Path(current.settings.janitor.archive.path)
    parent = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        return Finding("archive", "fail", f"{folder} cannot be written; change its owner, or janitor.archive.path")
    usage = shutil.disk_usage(parent)
    text = f"{folder}, {render.size(usage.free)} of {render.size(usage.total)} free"
    return Finding("archive", "ok" if usage.free > usage.total * _FREE_SHARE else "warn", text)


def _feedback(current: Session) -> Finding:
    with current.feedback():
        return Finding("feedback", "ok", "a transaction manager receives proven transactions")


def _hbase_tls(hbase: HBaseSettings, tls: ClientTlsSettings) -> Finding:
    """Check the files of ``storage.hbase.tls``; the check of the store connects to the servers."""
    from tms_core.tables.hbase.wire.security import client_tls  # noqa: PLC0415 not needed for help

    client_tls(hbase)
    certificate = f", client certificate {tls.certificate}" if tls.certificate else ""
    authorities = tls.ca_file or "the certificate authorities of the system"
    return Finding("hbase tls", "ok", f"servers are verified with {authorities}{certificate}")


def _login(name: str, setting: str, kerberos: KerberosSettings) -> Finding:
    """Fetch a ticket; the checks of store and snapshots show whether the services accept it."""
    from tms_core.security.kerberos import KerberosLogin  # noqa: PLC0415 gssapi belongs to an extra

    return Finding(name, "ok", KerberosLogin(setting, kerberos).describe())


def _named_files(current: Session) -> dict[str, Path]:
    """Return the files that settings name, by setting. Other paths are folders, which have defaults."""
    from tms_core.settings.fields import fields  # noqa: PLC0415 not needed for help

    defaults = {name: field.default for name, field in fields(type(current.settings))}
    unused = () if current.settings.storage.kind == "hbase" else ("storage.hbase.",)
    return {
        entry.path: entry.value
        for entry in current.loaded.entries()
        if isinstance(entry.value, Path)
        and not isinstance(defaults[entry.path], Path)
        and not entry.path.startswith(unused)
    }


def _files(files: dict[str, Path]) -> Finding:
    problems = []
    for name, path in files.items():
        try:
            check_file(name, path)
        except ConfigurationError as error:
            problems.append(str(error))
    if problems:
        return Finding("files", "fail", " ".join(problems))
    return Finding("files", "ok", f"all files that settings name can be read: {', '.join(files)}")


def _certificate(name: str, setting: str, tls: TlsSettings) -> Finding:
    from tms_core.security.tls import ServerCertificate  # noqa: PLC0415 not needed for help

    ServerCertificate(f"{setting}.", tls.certificate, tls.key)
    return Finding(name, "ok", f"{tls.certificate} and its key")


def _auth(auth: AuthSettings, clock: Clock) -> Finding:
    from tms_core.server.serving import make_gate  # noqa: PLC0415 not needed for help

    make_gate(auth, clock)
    return Finding("auth", "ok", f"{auth.kind}, {len(auth.rules)} rules")


def _spark() -> Finding:
    """Check the requirements of janitor spark; no other command needs them."""
    from janitor.spark import session as on  # noqa: PLC0415 not needed for help

    try:
        on.require_pyspark()
    except TmsError as error:
        return Finding("spark", "ok", f"not in use; {error}")
    try:
        on.require_java(os.environ)
    except TmsError as error:
        return Finding("spark", "warn", str(error))
    return Finding("spark", "ok", "pyspark, pyarrow and Java are installed")


def _run_check(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except TmsError as error:
        return Finding(name, "fail", str(error))


def _skip_check(name: str) -> Finding:
    return Finding(name, "fail", "not checked, because the store cannot be reached")


def _store(current: Session) -> Finding:
    if not current.place.exclusive:
        with current.place.readable() as store:
            return Finding("store", "ok", f"{current.place.name}, {len(store.metadata.rows())} topics")
    from tms_core.tables.leveldb.layout import FOLDERS  # noqa: PLC0415 a store in HBase does not need LevelDB

    topics, copied, holder = _look_inside(current)
    folders = [path for name in FOLDERS.values() if (path := _path(current) / name).exists()]
    for folder in folders:
        if not os.access(folder, os.W_OK):
            return Finding("store", "fail", f"{folder} cannot be written; run as its owner")
        if folder.stat().st_uid != os.geteuid():
            message = f"{folder} belongs to another user, who could not read new files of a sweep; run as its owner"
            return Finding("store", "warn", message)
    return Finding("store", "warn" if copied else "ok", f"{current.place.name}, {topics} topics{holder}{copied}")


def _look_inside(current: Session) -> tuple[int, str, str]:
    """Return the number of topics, whether plans must copy the store's files, and the holder of the store."""
    holder = current.holder()
    if holder is not None:
        topics = sum(holder.inspect("metadata", (), 0).counts.values())
        return topics, "", f", held by process {holder.process_identity.pid}, which responds"
    from tms_core.tables.leveldb.clone import clone  # noqa: PLC0415 as in _store

    with clone(_path(current), current.state_path) as store:
        copied = "" if store.linked else "; plans copy its files, because they cannot be linked into the state folder"
        return len(store.metadata.rows()), copied, ""


def _state(current: Session) -> Finding:
    record, last = _read_state(current)
    if record is None or record.adopted_ms is None:
        step = "look at janitor plan, then: janitor adopt"
        return Finding("state", "warn", f"{current.place.state_name}: not adopted yet; {step}")
    ran = f", last run {last.result or 'unfinished'} at {render.moment(last.started_ms)}" if last else ", never run"
    return Finding("state", "ok", f"{current.place.state_name}, adopted {render.moment(record.adopted_ms)}{ran}")


def _snapshots(current: Session) -> Finding:
    terms = current.terms()
    state = txstate.refresh(
        current.source(),
        current.clock.now_ms(),
        interval_seconds=terms.snapshot_interval_seconds,
        allowance_ms=terms.lifetime.allowance_ms,
    )
    if current.settings.transactions.source == "none":
        return Finding(
            "snapshots", "ok", "transactions.source is none: nothing is inverted and no boundary is published"
        )
    if state.problem is not None:
        return Finding("snapshots", "warn", f"{state.message.rstrip('.')}; nothing is inverted without a snapshot")
    return Finding("snapshots", "ok", f"{state.name}" + (f", {len(state.rejected)} skipped" if state.rejected else ""))


def _clock(current: Session) -> Finding:
    now, note = guards.read_clocks(current.clock), None
    if current.place.has_state():
        with current.place.state() as state:
            now = guards.read_clocks(current.clock)
            note = guards.check_clocks(state, now, current.terms().lifetime.allowance_ms)
    if note is None:
        return Finding("clock", "ok", render.moment(now.wall_ms))
    return Finding("clock", "fail" if note.tripped else "warn", note.message)


def _lifetime(current: Session) -> Finding:
    terms = current.terms()
    if terms.lifetime_known:
        return Finding("lifetime", "ok", f"transactions write for at most {duration(terms.lifetime.max_ms)}")
    return Finding(
        "lifetime",
        "warn",
        "transactions.max_lifetime_seconds is not set: 90000 is assumed, and no boundary is published",
    )


def _disk(current: Session) -> Finding:
    if not current.place.exclusive:
        return Finding("disk", "ok", "the store is on the disks of the cluster, which HBase monitors")
    path = _path(current)
    usage = shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists()))
    text = f"{render.size(usage.free)} of {render.size(usage.total)} free"
    return Finding("disk", "ok" if usage.free > usage.total * _FREE_SHARE else "warn", text)


def _leveldb() -> Finding:
    """Check the LevelDB library: a build may have slow compression."""
    from tms_core.tables.leveldb.library import build  # noqa: PLC0415 as in _store

    used = build()
    text = f"{used.binding} with LevelDB {used.leveldb}"
    if not used.is_slow:
        return Finding("leveldb", "ok", text)
    message = f"{text}, whose Snappy was compiled without optimization; use Python 3.12 or newer, or compile plyvel"
    return Finding("leveldb", "warn", message)


def _cdap(place: Place) -> Finding:
    """Check that CDAP itself does not clean the tables in HBase."""
    with place.readable() as store:
        found = [*store.obstacles(), *place.unseen]
    return _finding("cdap", found, "", "CDAP's observers and pruning do not work on these tables")


def _tables(place: Place) -> Finding:
    """Check that table settings do not make HBase keep deleted rows, or delete rows itself."""
    from tms_core.tables.hbase.described import REQUIRED_SETTINGS  # noqa: PLC0415 not needed for help

    found = [
        f"{table.name} has {name} {value}, not {REQUIRED_SETTINGS[name]}"
        for table in place.table_settings()
        for name, value in table.unfavorable.items()
    ]
    return _finding(
        "tables",
        found,
        ": see docs/how-to/hbase.md, Cheap sweeps",
        "no table setting slows a sweep",
    )


def _regions(place: Place) -> Finding:
    """Check that each bucket has a separate region, so that buckets are swept and compacted separately."""
    found = [
        f"{table.name} has no region that starts at {', '.join(f'x{start.hex()}' for start in table.missing_starts)}"
        for table in place.table_settings()
        if table.missing_starts
    ]
    advice = ": to split, see docs/how-to/hbase.md, Cheap sweeps"
    return _finding("regions", found, advice, "each bucket has a separate region")


def _finding(check: str, problems: list[str], advice: str, success: str) -> Finding:
    return Finding(check, "warn", "; ".join(problems) + advice) if problems else Finding(check, "ok", success)


def _read_state(current: Session) -> tuple[StoreRecord | None, RunRecord | None]:
    """Return the store and the last run from the state; do not create a missing state."""
    if not current.place.has_state():
        return None, None
    with current.place.state() as state:
        return state.store(), next(iter(state.runs(1)), None)


def _path(current: Session) -> Path:
    """Return the LevelDB folder."""
    return Path(current.settings.storage.leveldb.path)
