"""The janitor's settings, the shipped configuration files, and the configuration page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from janitor.settings import AllSettings, config_digest, load
from tms_core.errors import ConfigurationError
from tms_core.settings.fields import extra, fields, kinds
from tms_core.settings.layers import LoadedSettings
from tms_core.tables.leveldb.side import side_path

CONF = Path(__file__).parents[2] / "conf"


def load_settings(
    tmp_path: Path, yaml: str = "", environ: Mapping[str, str] | None = None, **flags: object
) -> LoadedSettings[AllSettings]:
    file = tmp_path / "tms.yaml"
    file.write_text(yaml, encoding="utf-8")
    return load(file, environ or {}, flags)


def load_error(tmp_path: Path, yaml: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(tmp_path, yaml)
    return str(caught.value)


def test_standalone_file_names_every_setting_and_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONF)
    built_in = load(None, {}, {})
    found = load(CONF / "standalone.yaml", {}, {})
    assert found.settings == built_in.settings
    unnamed = {entry.path for entry in found.entries() if entry.origin == "default"}
    named = (CONF / "standalone.yaml").read_text(encoding="utf-8")
    sections = {
        "server.tls",
        "transactions.tls",
        "transactions.kerberos",
        "storage.hbase.tls",
        "storage.hbase.kerberos",
    }
    assert unnamed == {*sections, "janitor.cron", "transactions.directory", "janitor.state"}, (
        "add it to conf/standalone.yaml"
    )
    assert all(f"# {name}: " in named for name in ("cron", "directory", "state")), "the file has them as comments"


def test_hbase_file_changes_what_a_cluster_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONF)
    default = {entry.path: entry.value for entry in load(None, {}, {}).entries()}
    found = load(CONF / "hbase.yaml", {}, {}).entries()
    assert {entry.path: entry.value for entry in found if entry.value != default[entry.path]} == {
        "storage.kind": "hbase",
        "transactions.source": "thrift",
        "janitor.apply": False,
    }


@pytest.mark.parametrize(("path", "field"), list(fields(AllSettings)))
def test_every_setting_has_a_description_a_reason_and_a_unit(path: str, field: Any) -> None:
    assert field.description
    assert extra(field, "reason")
    if int in kinds(field.annotation) and not path.endswith(".port"):
        assert extra(field, "unit")


def test_settings_of_a_store_by_any_name_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to("store")
    monkeypatch.chdir(tmp_path)
    names = ("store", "store/", "./store", "store/../store", "link", str(tmp_path / "store"))
    by_flag = [load_settings(tmp_path, "storage: {kind: hbase}", leveldb=name) for name in names]
    by_file = [load_settings(tmp_path, f"storage: {{leveldb: {{path: {name}}}}}") for name in names]
    by_environment = [load_settings(tmp_path, "", {"TMS_STORAGE__LEVELDB__PATH": name}) for name in names]
    monkeypatch.chdir(tmp_path / "store")
    for found in [*by_flag, *by_file, *by_environment, load_settings(tmp_path, leveldb=".")]:
        assert found.settings.storage.kind == "leveldb"
        assert found.settings.janitor.state == tmp_path / "store.janitor"
        assert found.settings.transactions.directory == str(tmp_path / "store.tx")
        assert side_path(found.settings.storage.leveldb.path) == tmp_path / "store.side"
        assert found.origin("janitor.state") == found.origin("transactions.directory") == "default"


def test_load_of_an_unknown_janitor_setting_is_rejected_with_a_suggestion(tmp_path: Path) -> None:
    assert "Did you mean janitor.workers?" in load_error(tmp_path, "janitor: {worker: 1}")
    assert "Did you mean janitor?" in load_error(tmp_path, "janitr: {}")
    with pytest.raises(ConfigurationError, match="enableServiceLinks: false"):
        load(None, {"TMS_JANITOR_PORT": "tcp://10.0.0.1:9847"}, {})
    assert load(None, {"TMS_JANITOR__WORKERS": "7"}, {}).settings.janitor.workers == 7


def test_load_of_a_cron_replaces_the_interval(tmp_path: Path) -> None:
    janitor = load_settings(tmp_path, "janitor: {cron: '*/5 * * * *'}").settings.janitor
    assert (janitor.cron, janitor.every_seconds) == ("*/5 * * * *", None)
    overridden = load_settings(
        tmp_path,
        "janitor: {every_seconds: 5}",
        {"TMS_JANITOR__CRON": "0 3 * * sun", "TMS_JANITOR__EVERY_SECONDS": "null"},
    )
    assert overridden.settings.janitor.cron == "0 3 * * sun"
    assert load_settings(tmp_path, "janitor: {cron: null}").settings.janitor.every_seconds == 60


def test_load_of_two_schedules_or_none_is_rejected(tmp_path: Path) -> None:
    assert "janitor.cron" in load_error(tmp_path, "janitor: {every_seconds: 60, cron: '* * * * *'}")
    assert "janitor.every_seconds" in load_error(tmp_path, "janitor: {every_seconds: null}")


@pytest.mark.parametrize(
    "cron",
    [
        "* * * * *",
        "0,30 8-18/2 1 jan-mar MON-fri",
        "59 23 31 12 7",
        "5/10 0 * * 0",
        "0 0 1-31/30 * *",
        "*/60 * * * *",
        "0 0 L * *",
    ],
)
def test_load_of_a_valid_crontab_line_keeps_it(tmp_path: Path, cron: str) -> None:
    assert load_settings(tmp_path, f"janitor: {{cron: '{cron}'}}").settings.janitor.cron == cron


@pytest.mark.parametrize(
    ("cron", "problem"),
    [
        ("* * * *", "five fields"),
        ("* * * * * *", "five fields"),
        ("@daily", "five fields"),
        ("60 * * * *", "60 is not a valid minute (0 to 59)"),
        ("* 24 * * *", "24 is not a valid hour"),
        ("* * 0 * *", "0 is not a valid day"),
        ("* * * 13 *", "13 is not a valid month"),
        ("* * * * 8", "8 is not a valid weekday"),
        ("* * * mon *", "mon is not a valid month"),
        ("30-10 * * * *", "30-10 is not a valid minute"),
        ("*/0 * * * *", "*/0 is not a valid minute"),
        ("* * 30 2 *", "30 is not a valid day"),
        ("0 0 */28 2 0#2", "never"),
        ("4-4/2 * * * *", "4-4 "),
        ("4-04/2 * * * *", "4-04 "),
        ("* * * * mon-1/2", "mon-1 "),
        ("* * * * mon-MON/2", "mon-MON with a step"),
        ("1, * * * *", "1, is not a valid minute"),
        ("-1 * * * *", "-1 is not a valid minute"),
    ],
)
def test_wrong_crontab_line_names_the_field(tmp_path: Path, cron: str, problem: str) -> None:
    assert problem in load_error(tmp_path, f"janitor: {{cron: '{cron}'}}")


@pytest.mark.parametrize(
    ("janitor", "path"),
    [
        ("apply: 1", "janitor.apply"),
        ("apply: 'yes'", "janitor.apply"),
        ("every_seconds: 0", "janitor.every_seconds"),
        ("every_seconds: 0.5", "janitor.every_seconds"),
        ("rate_rows_per_second: 0", "janitor.rate_rows_per_second"),
        ("batch_rows: 0", "janitor.batch_rows"),
        ("batch_rows: 100001", "janitor.batch_rows"),
        ("workers: true", "janitor.workers"),
        ("hold_seconds: -1", "janitor.hold_seconds"),
        ("hold_seconds: null", "janitor.hold_seconds"),
        ("clock_allowance_seconds: -1", "janitor.clock_allowance_seconds"),
        ("protect: 'default:*'", "janitor.protect"),
        ("protect: [audit]", "janitor.protect[0]"),
        ("protect: ['default:a b']", "janitor.protect[0]"),
        ("lease: {seconds: 0}", "janitor.lease.seconds"),
        ("boundary: {feedback: 'off'}", "janitor.boundary.feedback"),
        ("boundary: {participants: []}", "janitor.boundary.participants"),
        ("archive: {keep_days: 0}", "janitor.archive.keep_days"),
        ("history_days: 0", "janitor.history_days"),
        ("metrics: {per_topic: some}", "janitor.metrics.per_topic"),
        ("metrics: {top: 0}", "janitor.metrics.top"),
        ("http: {port: 65536}", "janitor.http.port"),
        ("http: {host: ''}", "janitor.http.host"),
        ("state: null", "janitor.state"),
    ],
)
def test_impossible_value_names_the_setting(tmp_path: Path, janitor: str, path: str) -> None:
    assert load_error(tmp_path, f"janitor: {{{janitor}}}").startswith(f"{path} = ")


def test_load_of_a_state_or_archive_inside_the_store_is_rejected(tmp_path: Path) -> None:
    assert "janitor.state" in load_error(tmp_path, "janitor: {state: data/messaging/state}")
    (tmp_path / "link").symlink_to(tmp_path / "data/messaging")
    assert "inside the store" in load_error(tmp_path, "janitor: {state: link/state}")
    archive = "janitor: {archive: {enabled: %s, path: data/messaging/archive}}"
    assert "janitor.archive.path" in load_error(tmp_path, archive % "true")
    assert load_settings(tmp_path, archive % "false").settings.janitor.archive.path.endswith("messaging/archive")
    elsewhere = load_settings(tmp_path, "janitor: {archive: {enabled: true, path: 's3://bucket/archive'}}")
    assert elsewhere.settings.janitor.archive.path == "s3://bucket/archive"


@pytest.mark.parametrize(
    "yaml",
    [
        "transactions: {source: none}",
        "transactions: {source: directory}",
        "transactions: {directory: /elsewhere}",
        "transactions: {snapshot_interval_seconds: 61}",
        "server: {consumers: {floor: true}}",
        "transactions: {max_lifetime_seconds: 90000}",
        "transactions: {grace_seconds: 0}",
        "janitor: {hold_seconds: 0}",
        "janitor: {clock_allowance_seconds: 0}",
        "janitor: {protect: ['default:audit']}",
    ],
)
def test_digest_changes_with_settings_of_deletion(tmp_path: Path, yaml: str) -> None:
    assert config_digest(load_settings(tmp_path, yaml).settings) != config_digest(load_settings(tmp_path).settings)


def test_digest_is_the_same_for_patterns_in_another_order(tmp_path: Path) -> None:
    one, other = (
        load_settings(tmp_path, f"janitor: {{protect: {order}}}") for order in ("['a:*', 'b:*']", "['b:*', 'a:*']")
    )
    assert config_digest(one.settings) == config_digest(other.settings)


@pytest.mark.parametrize(
    "yaml",
    [
        "storage: {kind: memory}",
        "server: {port: 1}",
        "janitor: {workers: 9, batch_rows: 9, apply: false, state: /elsewhere, cron: '* * * * *'}",
        "transactions: {thrift: 'elsewhere:1'}",
    ],
)
def test_digest_ignores_settings_unrelated_to_deletion(tmp_path: Path, yaml: str) -> None:
    assert config_digest(load_settings(tmp_path, yaml).settings) == config_digest(load_settings(tmp_path).settings)
