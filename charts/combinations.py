"""Combinations of the chart's values that the schema requires.

Each combination is JSON Schema (``if``, ``then``) with a sentence. Helm shows the sentence when it refuses values, and
the chart's README lists it.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _holds(path: str, found: Schema) -> Schema:
    """That a value is there and is such a one."""
    for name in reversed(path.split(".")):
        found = {"properties": {name: found}, "required": [name]}
    return found


def _is(path: str, *values: object) -> Schema:
    """That a value is there and one of these."""
    return _holds(path, {"enum": list(values)})


def _all(*parts: Schema) -> Schema:
    return {"allOf": list(parts)}


def _never(path: str, found: Schema) -> Schema:
    """That a value, if it is there, is no such one; the refusal names it."""
    return _within(path, {"not": found})


def _within(path: str, found: Schema) -> Schema:
    """That a value, if it is there, is such a one."""
    for name in reversed(path.split(".")):
        found = {"properties": {name: found}}
    return found


_GIVEN: Schema = {"type": "string", "minLength": 1}
_LOOPBACK: Schema = {"pattern": r"^(127\.|localhost$|::1$)"}
_LOOPBACK_PORT: Schema = {"pattern": r"^(127\.|localhost:|\[::1\]:)"}
#: In the volume, wherever it is mounted.
_KEPT: Schema = {"pattern": r"^/var/lib/tms/[^./]"}
_ADDRESS: Schema = {"pattern": r"^(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$"}
_SWEEP: Schema = {"contains": {"const": "sweep"}}
_SPARK_SWEEPS = _all(_is("spark.enabled", True), _holds("spark.command", _SWEEP))
_SEVERAL: Schema = {"anyOf": [_holds("serverReplicas", {"minimum": 2}), _holds("server.leader.slots", {"minimum": 2})]}
#: What one server manages is in its volume; several have their log in HBase.
_MANAGES_IN_VOLUME = _all(_is("transactions.source", "manager"), {"not": _SEVERAL})
_ARCHIVES = _is("janitor.archive.enabled", True)

#: What goes together: what is said when it does not, if, then.
COMBINATIONS: tuple[tuple[str, Schema, Schema], ...] = (
    (
        "LevelDB allows one process: run server and janitor in one pod, with a persistent volume.",
        _is("storage.kind", "leveldb"),
        {"allOf": [_is("mode", "deployment"), _is("server.enabled", True), _is("persistence.enabled", True)]},
    ),
    (
        "A store in memory is lost with its pod.",
        {},
        _is("storage.kind", "leveldb", "hbase"),
    ),
    (
        "The server of a LevelDB store manages its transactions, and Spark cannot read the store.",
        _is("storage.kind", "leveldb"),
        {"allOf": [_is("transactions.source", "manager", "none"), {"not": _is("spark.enabled", True)}]},
    ),
    (
        "Only the server manages transactions.",
        {"allOf": [_is("transactions.source", "manager")]},
        _is("server.enabled", True),
    ),
    (
        "The manager's log needs a persistent volume.",
        _all(_MANAGES_IN_VOLUME, _is("server.enabled", True)),
        _is("persistence.enabled", True),
    ),
    (
        "The server serves other pods, so it needs authentication (`server.auth`).",
        _is("server.enabled", True),
        _is("server.auth.kind", "tokens", "jwt"),
    ),
    (
        "The transaction service serves other pods, so it needs a `token_file`, or `allow_without_token`.",
        _all(
            _is("transactions.source", "manager"),
            {"anyOf": [_is("storage.kind", "hbase"), _holds("transactions.thrift", {"not": _LOOPBACK_PORT})]},
        ),
        {"anyOf": [_holds("transactions.token_file", _GIVEN), _is("transactions.allow_without_token", True)]},
    ),
    (
        "Several servers need a store and a transaction log in HBase, not in a volume.",
        _SEVERAL,
        {"allOf": [_is("storage.kind", "hbase"), _is("transactions.source", "manager", "thrift", "none")]},
    ),
    (
        "Spark needs an image that contains it (`spark.image`).",
        _is("spark.enabled", True),
        {"properties": {"spark": {"properties": {"image": {"minLength": 1}}}}},
    ),
    (
        "An archive needs a persistent volume.",
        _ARCHIVES,
        _all(_is("persistence.enabled", True), _holds("janitor.archive.path", _KEPT)),
    ),
    (
        "A store in a volume and its state must be in `/var/lib/tms`.",
        _is("storage.kind", "leveldb"),
        _all(_holds("storage.leveldb.path", _KEPT), _holds("janitor.state", _KEPT)),
    ),
    (
        "The transaction log of a single server must be in `/var/lib/tms`.",
        _MANAGES_IN_VOLUME,
        _holds("transactions.directory", _KEPT),
    ),
    (
        "If two pods mount the volume (for an archive and a transaction log or Spark sweeps), it is `ReadWriteMany`.",
        _all(
            _is("storage.kind", "hbase"),
            _ARCHIVES,
            {"anyOf": [_MANAGES_IN_VOLUME, _SPARK_SWEEPS]},
        ),
        _holds("persistence.accessModes", {"contains": {"const": "ReadWriteMany"}}),
    ),
    (
        "Workers of `spark://…` and `sc://…` cannot mount the chart's volume, so their sweeps cannot archive.",
        _all(_ARCHIVES, _SPARK_SWEEPS),
        _never("spark.master", {"pattern": "^(spark|sc)://"}),
    ),
    (
        "A second pod executes decisions about a store in a volume, so the volume cannot be `ReadWriteOncePod`.",
        _all(
            _is("storage.kind", "leveldb"),
            {"anyOf": [_holds("decisions.adopt", _GIVEN), _holds("decisions.approve", {"minItems": 1})]},
        ),
        _never("persistence.accessModes", {"contains": {"const": "ReadWriteOncePod"}}),
    ),
    (
        "A daemon never releases the lease, so Spark sweeps need `mode: cronjob`.",
        _all(_is("mode", "deployment"), _is("spark.enabled", True)),
        _never("spark.command", _SWEEP),
    ),
    (
        "Other pods connect to fixed ports: do not use a loopback address or port 0.",
        {},
        _all(
            _never("janitor.http.port", {"const": 0}),
            _never("server.port", {"const": 0}),
            _never("janitor.http.host", _LOOPBACK),
            _never("server.host", _LOOPBACK),
        ),
    ),
    (
        "On HBase the transaction manager listens on 15165, so the server cannot.",
        _all(_is("storage.kind", "hbase"), _is("transactions.source", "manager")),
        _never("server.port", {"const": 15165}),
    ),
    (
        "`kind: tokens` needs a file (`server.auth.tokens_file`).",
        _all(_is("server.enabled", True), _is("server.auth.kind", "tokens")),
        _holds("server.auth.tokens_file", _GIVEN),
    ),
    (
        "`kind: jwt` needs a file of keys (`server.auth.key_file`).",
        _all(_is("server.enabled", True), _is("server.auth.kind", "jwt")),
        _holds("server.auth.key_file", _GIVEN),
    ),
    (
        "`janitor.cron` and `janitor.every_seconds` exclude each other.",
        _holds("janitor.cron", {"type": "string"}),
        _never("janitor.every_seconds", {"type": "integer"}),
    ),
    (
        "An Ingress needs a server and host names (`ingress.hosts`).",
        _is("ingress.enabled", True),
        _all(_is("server.enabled", True), _holds("ingress.hosts", {"minItems": 1})),
    ),
    (
        "A ServiceMonitor and a PodMonitor together would scrape everything twice.",
        _is("podMonitor.enabled", True),
        _never("serviceMonitor.enabled", {"const": True}),
    ),
    (
        "Addresses must be `HOST:PORT`, because a NetworkPolicy opens the port.",
        {},
        _all(
            _within("storage.hbase.thrift", {"items": _ADDRESS}),
            _within("storage.hbase.thrift2", {"items": _ADDRESS}),
            _within("transactions.thrift", _ADDRESS),
        ),
    ),
    (
        "A store on HBase needs `storage.hbase.thrift`.",
        _is("storage.kind", "hbase"),
        _holds("storage.hbase.thrift", {"type": "array"}),
    ),
)
