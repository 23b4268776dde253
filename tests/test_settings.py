"""Settings: four layers, the origin of each value, and errors with a remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tms_core.errors import ConfigurationError
from tms_core.settings.fields import fields
from tms_core.settings.layers import LoadedSettings
from tms_core.settings.models import Settings, StorageSettings, TransactionSettings, expand_topics, load


def loaded(
    tmp_path: Path, yaml: str = "", environ: Mapping[str, str] | None = None, **flags: object
) -> LoadedSettings[Settings]:
    file = tmp_path / "tms.yaml"
    file.write_text(yaml, encoding="utf-8")
    return load(file, environ or {}, flags)


def refused(tmp_path: Path, yaml: str = "", environ: Mapping[str, str] | None = None, **flags: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        loaded(tmp_path, yaml, environ, **flags)
    return str(caught.value)


# --- layers ----------------------------------------------------------------------------------------------------------


def test_load_of_nothing_is_the_built_in_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = load(None, {}, {})
    assert found.settings.storage.kind == "leveldb"
    assert found.settings.storage.leveldb.path == tmp_path / "data/messaging"
    assert found.settings.server.port == 11015
    assert {entry.origin for entry in found.entries()} == {"default"}


@given(in_file=st.none() | st.integers(1, 9), in_environment=st.none() | st.integers(1, 9))
def test_load_of_several_layers_names_the_upper_one(
    tmp_path_factory: pytest.TempPathFactory, in_file: int | None, in_environment: int | None
) -> None:
    tmp_path = tmp_path_factory.mktemp("layers")
    yaml = "" if in_file is None else f"server: {{port: {in_file}}}"
    environ = {} if in_environment is None else {"TMS_SERVER__PORT": str(in_environment)}
    found = loaded(tmp_path, yaml, environ)
    expected = [
        (in_environment, "environment TMS_SERVER__PORT"),
        (in_file, f"file {tmp_path / 'tms.yaml'}"),
        (11015, "default"),
    ]
    assert (found.settings.server.port, found.origin("server.port")) == next(e for e in expected if e[0] is not None)


def test_load_of_flags_overrides_file_and_environment(tmp_path: Path) -> None:
    yaml = "storage: {kind: memory, hbase: {thrift: ['file:1']}}\ntransactions: {source: none}"
    environ = {"TMS_STORAGE__KIND": "leveldb", "TMS_TRANSACTIONS__DIRECTORY": "/elsewhere"}
    found = loaded(tmp_path, yaml, environ, hbase="a:1, b:2", snapshots="webhdfs://namenode:9870/tx", leveldb=None)
    assert found.settings.storage.kind == "hbase"
    assert found.settings.storage.hbase.thrift == ("a:1", "b:2")
    assert found.settings.transactions.source == "directory"
    assert found.settings.transactions.directory == "webhdfs://namenode:9870/tx"
    assert found.origin("storage.kind") == found.origin("storage.hbase.thrift") == "flag --hbase"
    assert found.origin("transactions.source") == "flag --snapshots"


def test_load_in_a_deleted_folder_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deleted = tmp_path / "deleted"
    deleted.mkdir()
    monkeypatch.chdir(deleted)
    deleted.rmdir()
    with pytest.raises(ConfigurationError, match="deleted"):
        load(None, {}, {"leveldb": str(tmp_path)})


def test_load_of_relative_paths_starts_at_folder_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standing = tmp_path / "standing"
    standing.mkdir()
    monkeypatch.chdir(standing)
    environ = {"TMS_SERVER__AUTH__TOKENS_FILE": "tokens"}
    yaml = "server: {tls: {certificate: a.crt, key: /keys/a.key}}"
    settings = loaded(tmp_path, yaml, environ, leveldb="store").settings
    assert settings.storage.leveldb.path == standing / "store"
    assert settings.server.auth.tokens_file == tmp_path / "tokens"
    assert settings.transactions.directory == str(standing / "store.tx")
    assert settings.server.tls is not None
    assert (settings.server.tls.certificate, settings.server.tls.key) == (tmp_path / "a.crt", Path("/keys/a.key"))


def test_load_of_a_store_by_flag_places_snapshots_next_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = "transactions.directory"
    found = loaded(tmp_path, "", leveldb="store")
    assert (found.settings.transactions.directory, found.origin(path)) == (f"{tmp_path}/store.tx", "default")
    in_file = loaded(tmp_path, "transactions: {directory: mine}", leveldb="store")
    assert in_file.settings.transactions.directory == f"{tmp_path}/mine"
    in_environment = loaded(tmp_path, "", {"TMS_TRANSACTIONS__DIRECTORY": "ours"}, leveldb="store")
    assert in_environment.settings.transactions.directory == f"{tmp_path}/ours"
    by_flag = loaded(tmp_path, "", leveldb="store", snapshots="theirs")
    assert (by_flag.settings.transactions.directory, by_flag.origin(path)) == (f"{tmp_path}/theirs", "flag --snapshots")
    assert loaded(tmp_path, "").settings.transactions.directory == f"{tmp_path}/data/messaging.tx"


@pytest.mark.parametrize(
    ("entry", "topics"),
    [
        ("default:events", ["default:events"]),
        ("audit", ["system:audit"]),
        ("audit:2", ["system:audit0", "system:audit1"]),
        ("default:events:3", ["default:events0", "default:events1", "default:events2"]),
        ("audit:1", ["system:audit0"]),
        ("default:2024-events", ["default:2024-events"]),
    ],
)
def test_system_topics_are_expanded_as_cdap_does(tmp_path: Path, entry: str, topics: list[str]) -> None:
    [found] = loaded(tmp_path, f"server: {{system_topics: ['{entry}']}}").settings.server.system_topics
    assert [str(topic) for topic in expand_topics(found)] == topics


def test_load_of_empty_sections_has_defaults(tmp_path: Path) -> None:
    assert loaded(tmp_path, "storage:\nserver:\n  tls:\n").settings.server.tls is None
    assert loaded(tmp_path, "# nothing").origins == {}


def test_load_by_the_core_ignores_the_section_of_the_janitor(tmp_path: Path) -> None:
    environ = {"TMS_JANITOR__WORKERS": "x", "TMS_JANITOR_PORT": "tcp://10.0.0.1:9847"}
    assert loaded(tmp_path, "janitor: {anything: [1]}", environ).origins == {}


def test_entries_list_each_setting_once(tmp_path: Path) -> None:
    shown = [entry.path for entry in loaded(tmp_path).entries()]
    expected = {re.sub(r"\.(tls|kerberos)\..*", r".\1", path) for path, _ in fields(Settings)}
    assert sorted(shown) == sorted(expected)


def test_settings_reject_changes(tmp_path: Path) -> None:
    settings = loaded(tmp_path).settings
    with pytest.raises(ValidationError, match="frozen"):
        settings.storage.kind = "memory"


# --- the environment -------------------------------------------------------------------------------------------------


def test_environment_is_text_as_it_is_and_the_rest_yaml(tmp_path: Path) -> None:
    environ = {
        "TMS_STORAGE__HBASE__NAMESPACE": "0123",
        "TMS_STORAGE__HBASE__THRIFT": '["a:1", "b:2"]',
        "TMS_STORAGE__HBASE__TIMEOUT_SECONDS": "5",
        "TMS_STORAGE__LEVELDB__PATH": "/2024-01-01",
        "TMS_TRANSACTIONS__MAX_LIFETIME_SECONDS": "null",
        "TMS_SERVER__AUTH__ISSUER": "",
    }
    settings = loaded(tmp_path, "transactions: {max_lifetime_seconds: 5}", environ).settings
    assert settings.storage.hbase.namespace == "0123"
    assert settings.storage.hbase.thrift == ("a:1", "b:2")
    assert settings.storage.hbase.timeout_seconds == 5
    assert settings.storage.leveldb.path == Path("/2024-01-01")
    assert settings.transactions.max_lifetime_seconds is None
    assert settings.server.auth.issuer is None
    assert "cannot be read" in refused(tmp_path, "", {"TMS_STORAGE__HBASE__THRIFT": "[" * 5000})


@pytest.mark.parametrize("name", ["TMS_PORT", "TMS_SERVICE_HOST", "TMS_STORAGES__KIND", "XTMS_SERVER_PORT", "TMS_"])
def test_environment_name_without_a_section_is_ignored(tmp_path: Path, name: str) -> None:
    assert loaded(tmp_path, "", {name: "tcp://10.0.0.1:11015"}).origins == {}


@pytest.mark.parametrize("name", ["TMS_SERVER_PORT", "TMS_SERVER_PORT_11015_TCP", "TMS_SERVER", "TMS_SERVER__PRT"])
def test_environment_with_an_unknown_name_explains_injected_names(tmp_path: Path, name: str) -> None:
    message = refused(tmp_path, "", {name: "tcp://10.0.0.1:11015"})
    assert name in message
    assert "enableServiceLinks: false" in message


@pytest.mark.parametrize("name", ["TMS_SERVER_PORT", "TMS_SERVER__PRT"])
def test_environment_of_a_mistyped_name_is_rejected_with_a_suggestion(tmp_path: Path, name: str) -> None:
    assert "Did you mean TMS_SERVER__PORT?" in refused(tmp_path, "", {name: "1"})


@pytest.mark.parametrize("name", ["TMS_server__port", "TMS_Server__Port", "TMS_SERVER__port"])
def test_environment_in_small_letters_is_rejected_and_never_wins(tmp_path: Path, name: str) -> None:
    message = refused(tmp_path, "", {"TMS_SERVER__PORT": "1", name: "2"})
    assert name in message
    assert "Did you mean TMS_SERVER__PORT?" in message


# --- invalid files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("yaml", "path", "hint"),
    [
        ("storage: {leveldb: {pth: x}}", "storage.leveldb.pth", "Did you mean storage.leveldb.path?"),
        ("storage: {path: x}", "storage.path", "Did you mean storage.leveldb.path?"),
        ("storge: {}", "storge", "Did you mean storage?"),
        ("server: {zzz: 1}", "server.zzz", "Valid settings: server.host, server.port,"),
        ("server: {1: 1}", "server.1", "Valid settings: server.host"),
        ("janitr: {}", "janitr", "Valid settings: storage, transactions, server."),
    ],
)
def test_unknown_setting_suggests_a_similar_name(tmp_path: Path, yaml: str, path: str, hint: str) -> None:
    message = refused(tmp_path, yaml)
    assert message.startswith(f"{path} ")
    assert f"(file {tmp_path / 'tms.yaml'})" in message
    assert hint in message


#: Lists of aliases of lists, 4 billion values in all.
ALIASES = "janitor: {0: &0 x}\n" + "".join(f"{n}: &{n} [{f'*{n - 1}, ' * 16}]\n" for n in range(1, 9))


@pytest.mark.parametrize(
    ("yaml", "problem"),
    [
        ("server: " + "[" * 5000, "nested too deeply"),
        (f"{ALIASES}server: *8\n", "line 7 .*16777216 characters"),
        ("server: &server {host: *server}", "line 1 .*aliases"),
        ("#" * (1 << 20) + "\nserver: {}", "more than 1048576 bytes"),
        ("server:\n  port: 1\n  host: a\n  port: 2\n", "line 4 .*port .*twice"),
        ("server:\n  port: [\n", "line 3 "),
        ("server:\n  ? [port]\n  : 1\n", "line 2 .*list"),
        ("server: {port: 2024-13-45}", "month"),
        ("server: '\x00'", "YAML"),
        ("- server", "mapping"),
    ],
)
def test_file_that_is_not_right_names_the_line(tmp_path: Path, yaml: str, problem: str) -> None:
    message = refused(tmp_path, yaml)
    assert str(tmp_path / "tms.yaml") in message
    assert re.search(problem, message)


def test_load_of_an_overridden_merge_key_is_not_a_duplicate(tmp_path: Path) -> None:
    yaml = "janitor: {common: &common {port: 1, cache_mb: 2}}\nserver:\n  <<: *common\n  port: 3\n"
    server = loaded(tmp_path, yaml).settings.server
    assert (server.port, server.cache_mb) == (3, 2)


def test_load_of_a_yaml_tag_that_runs_code_is_rejected(tmp_path: Path) -> None:
    assert "YAML" in refused(tmp_path, "server: {host: !!python/object/apply:os.getcwd []}")


# --- invalid values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("yaml", "path", "problem"),
    [
        ("storage: {kind: level}", "storage.kind = 'level'", "'leveldb', 'hbase' or 'memory'"),
        ("storage: {hbase: {thrift: []}}", "storage.hbase.thrift = []", "list should have at least 1 item"),
        ("storage: {hbase: {thrift: ['a:1', a]}}", "storage.hbase.thrift[1] = 'a'", "HOST:PORT"),
        ("storage: {hbase: {thrift: ['a:0']}}", "storage.hbase.thrift[0] = 'a:0'", "HOST:PORT"),
        ("storage: {hbase: {thrift: ['a:65536']}}", "storage.hbase.thrift[0] = 'a:65536'", "HOST:PORT"),
        ("storage: {hbase: {thrift: 'a:1'}}", "storage.hbase.thrift = 'a:1'", 'write ["a:1"]'),
        ("storage: {hbase: {buckets: 257}}", "storage.hbase.buckets = 257", "less than or equal to 256"),
        ("storage: {hbase: {buckets: true}}", "storage.hbase.buckets = True", "valid integer"),
        ("storage: {hbase: {namespace: 'a:b'}}", "storage.hbase.namespace = 'a:b'", "pattern"),
        ("storage: {leveldb: {path: ''}}", "storage.leveldb.path = ''", "not a path"),
        ("storage: {leveldb: {path: ~/store}}", "storage.leveldb.path = '~/store'", "expanded"),
        ('storage: {leveldb: {path: "/a\\0b"}}', r"storage.leveldb.path = '/a\x00b'", "full path"),
        ('storage: {leveldb: {path: "/\\ud800"}}', r"storage.leveldb.path = '/\ud800'", "full path"),
        ("storage: {leveldb: {path: 5}}", "storage.leveldb.path = 5", "path"),
        ("transactions: {snapshot_interval_seconds: 0}", "transactions.snapshot_interval_seconds = 0", "equal to 1"),
        ("transactions: {grace_seconds: -1}", "transactions.grace_seconds = -1", "equal to 0"),
        ("transactions: {thrift: nowhere}", "transactions.thrift = 'nowhere'", "HOST:PORT"),
        ("server: {port: 65536}", "server.port = 65536", "equal to 65535"),
        ("server: {port: -1}", "server.port = -1", "equal to 0"),
        ("server: {port: '11015'}", "server.port = '11015'", "valid integer"),
        ("server: {default_ttl_seconds: 2147483648}", "server.default_ttl_seconds = 2147483648", "2147483647"),
        ("server: {system_topics: ['a.b']}", "server.system_topics[0] = 'a.b'", "namespace:topic"),
        ("server: {system_topics: ['a:b:c']}", "server.system_topics[0] = 'a:b:c'", "namespace:topic"),
        ("server: {system_topics: ['a:0']}", "server.system_topics[0] = 'a:0'", "1 to 1000"),
        ("server: {system_topics: ['a:b:1001']}", "server.system_topics[0] = 'a:b:1001'", "1 to 1000"),
        ("server: {system_topics: [':5']}", "server.system_topics[0] = ':5'", "namespace:topic"),
        ("server: {tls: {certificate: a}}", "server.tls.key", "is missing"),
        ("server: {host: 0.0.0.0}", "server.host", "127.0.0.1"),
        ("server: {host: example.com}", "server.host", "127.0.0.1"),
        ("server: {auth: {kind: tokens}}", "server.auth.tokens_file", "kind tokens"),
        ("server: {auth: {kind: jwt}}", "server.auth.key_file", "kind jwt"),
        *(
            (
                f"server: {{auth: {{algorithms: [{name}]}}}}",
                f"server.auth.algorithms[0] = '{name}'",
                "should be 'RS256'",
            )
            for name in ("none", "HS256", "HS384", "HS512", "ES256K")
        ),
        ("server: {auth: {algorithms: []}}", "server.auth.algorithms = []", "at least 1 item"),
        ("server: {auth: {rules: [{principal: a, topics: ['a:b'], can: [admin]}]}}", "server.auth.rules", "kind none"),
        (
            "server: {auth: {kind: tokens, tokens_file: t, rules: [{principal: a, topics: [b], can: [admin]}]}}",
            "server.auth.rules[0].topics[0] = 'b'",
            "NAMESPACE:TOPIC",
        ),
        (
            "server: {auth: {kind: tokens, tokens_file: t, rules: [{principle: a, topics: ['*:*'], can: [admin]}]}}",
            "server.auth.rules[0].principle",
            "is not a setting",
        ),
    ],
)
def test_impossible_value_names_setting_and_way_out(tmp_path: Path, yaml: str, path: str, problem: str) -> None:
    message = refused(tmp_path, yaml)
    assert path in message
    assert problem in message
    assert f"(file {tmp_path / 'tms.yaml'})" in message or "(default)" in message or "is missing" in message


def test_impossible_value_in_the_environment_names_its_variable(tmp_path: Path) -> None:
    message = refused(tmp_path, "", {"TMS_STORAGE__HBASE__TIMEOUT_SECONDS": "soon"})
    assert message.startswith(
        "storage.hbase.timeout_seconds = 'soon' (environment TMS_STORAGE__HBASE__TIMEOUT_SECONDS)"
    )
    assert "Correct storage.hbase.timeout_seconds: time limit of a call" in message
    assert "default: 30" in message
    assert "cannot be read" in refused(tmp_path, "", {"TMS_STORAGE__HBASE__THRIFT": "["})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_load_of_a_loopback_address_needs_no_authentication(tmp_path: Path, host: str) -> None:
    assert loaded(tmp_path, f"server: {{host: '{host}'}}").settings.server.host == host


def test_load_with_authentication_allows_any_address(tmp_path: Path) -> None:
    yaml = (
        "server: {host: 0.0.0.0, auth: {kind: tokens, tokens_file: t,"
        " rules: [{principal: a, topics: ['default:*'], can: [publish]}]}}"
    )
    assert loaded(tmp_path, yaml).settings.server.auth.rules[0].can == ("publish",)


# --- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["data/messaging", "data/messaging/tx", "data/../data/messaging/tx"])
def test_snapshots_of_the_manager_inside_the_store_are_rejected(tmp_path: Path, place: str) -> None:
    assert f"{place} " in refused(tmp_path, f"transactions: {{directory: {place}}}")
    for harmless in ("{directory: %s}\nstorage: {kind: hbase}", "{directory: %s, source: directory}"):
        found = loaded(tmp_path, f"transactions: {harmless % place}").settings
        assert found.transactions.directory == str(tmp_path / place)


def test_snapshot_directory_by_source_is_an_available_directory_or_none(tmp_path: Path) -> None:
    there, absent = str(tmp_path), str(tmp_path / "absent")
    assert TransactionSettings(source="directory", directory=absent).snapshot_directory() == absent
    assert TransactionSettings(source="directory", directory="webhdfs://n:1/tx").snapshot_directory() is not None
    assert TransactionSettings(source="manager", directory=there).snapshot_directory() == there
    assert TransactionSettings(source="manager", directory=absent).snapshot_directory() is None
    assert TransactionSettings(source="thrift", directory=there).snapshot_directory() is None
    assert TransactionSettings(source="none", directory=there).snapshot_directory() is None


def test_settings_model_with_an_unknown_name_is_rejected() -> None:
    with pytest.raises(ValidationError, match="extra"):
        StorageSettings.model_validate({"kin": "memory"})
