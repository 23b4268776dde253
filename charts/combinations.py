"""The combinations of values that the chart's schema requires.

Each combination is JSON Schema (``if``, ``then``) with a sentence. Helm shows the sentence when it rejects values, and
the chart's README lists all sentences.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _has(path: str, found: Schema) -> Schema:
    """Return a schema that requires a value, and its schema."""
    for name in reversed(path.split(".")):
        found = {"properties": {name: found}, "required": [name]}
    return found


def _is(path: str, *values: object) -> Schema:
    """Return a schema that requires one of these values."""
    return _has(path, {"enum": list(values)})


def _all(*parts: Schema) -> Schema:
    return {"allOf": list(parts)}


def _not(path: str, found: Schema) -> Schema:
    """Return a schema that rejects some values of an optional value; Helm's error names the value."""
    return _optional(path, {"not": found})


def _optional(path: str, found: Schema) -> Schema:
    """Return a schema for an optional value."""
    for name in reversed(path.split(".")):
        found = {"properties": {name: found}}
    return found


_TEXT: Schema = {"type": "string", "minLength": 1}
_LOOPBACK: Schema = {"pattern": r"^(127\.|localhost$|::1$)"}
_LOOPBACK_PORT: Schema = {"pattern": r"^(127\.|localhost:|\[::1\]:)"}
#: A path in the volume's mount point.
_IN_VOLUME: Schema = {"pattern": r"^/var/lib/tms/[^./]"}
_ADDRESS: Schema = {"pattern": r"^(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$"}
_SWEEP: Schema = {"contains": {"const": "sweep"}}
_SPARK_SWEEPS = _all(_is("spark.enabled", True), _has("spark.command", _SWEEP))
_SEVERAL: Schema = {"anyOf": [_has("serverReplicas", {"minimum": 2}), _has("server.leader.slots", {"minimum": 2})]}
#: The transaction log of a single server is in its volume; several servers have their log in HBase.
_MANAGES_IN_VOLUME = _all(_is("transactions.source", "manager"), {"not": _SEVERAL})
_ARCHIVES = _is("janitor.archive.enabled", True)

#: The combinations: the sentence of the error, the schema of the condition, and the schema that must hold then.
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
            {"anyOf": [_is("storage.kind", "hbase"), _has("transactions.thrift", {"not": _LOOPBACK_PORT})]},
        ),
        {"anyOf": [_has("transactions.token_file", _TEXT), _is("transactions.allow_without_token", True)]},
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
        _all(_is("persistence.enabled", True), _has("janitor.archive.path", _IN_VOLUME)),
    ),
    (
        "A store in a volume and its state must be in `/var/lib/tms`.",
        _is("storage.kind", "leveldb"),
        _all(_has("storage.leveldb.path", _IN_VOLUME), _has("janitor.state", _IN_VOLUME)),
    ),
    (
        "The transaction log of a single server must be in `/var/lib/tms`.",
        _MANAGES_IN_VOLUME,
        _has("transactions.directory", _IN_VOLUME),
    ),
    (
        "If two pods mount the volume (for an archive and a transaction log or Spark sweeps), it is `ReadWriteMany`.",
        _all(
            _is("storage.kind", "hbase"),
            _ARCHIVES,
            {"anyOf": [_MANAGES_IN_VOLUME, _SPARK_SWEEPS]},
        ),
        _has("persistence.accessModes", {"contains": {"const": "ReadWriteMany"}}),
    ),
    (
        "Workers of `spark://…` and `sc://…` cannot mount the chart's volume, so their sweeps cannot archive.",
        _all(_ARCHIVES, _SPARK_SWEEPS),
        _not("spark.master", {"pattern": "^(spark|sc)://"}),
    ),
    (
        "A second pod executes decisions about a store in a volume, so the volume cannot be `ReadWriteOncePod`.",
        _all(
            _is("storage.kind", "leveldb"),
            {"anyOf": [_has("decisions.adopt", _TEXT), _has("decisions.approve", {"minItems": 1})]},
        ),
        _not("persistence.accessModes", {"contains": {"const": "ReadWriteOncePod"}}),
    ),
    (
        "A daemon never releases the lease, so Spark sweeps need `mode: cronjob`.",
        _all(_is("mode", "deployment"), _is("spark.enabled", True)),
        _not("spark.command", _SWEEP),
    ),
    (
        "Other pods connect to fixed ports: do not use a loopback address or port 0.",
        {},
        _all(
            _not("janitor.http.port", {"const": 0}),
            _not("server.port", {"const": 0}),
            _not("janitor.http.host", _LOOPBACK),
            _not("server.host", _LOOPBACK),
        ),
    ),
    (
        "On HBase the transaction manager listens on 15165, so the server cannot.",
        _all(_is("storage.kind", "hbase"), _is("transactions.source", "manager")),
        _not("server.port", {"const": 15165}),
    ),
    (
        "`kind: tokens` needs a file (`server.auth.tokens_file`).",
        _all(_is("server.enabled", True), _is("server.auth.kind", "tokens")),
        _has("server.auth.tokens_file", _TEXT),
    ),
    (
        "`kind: jwt` needs a file of keys (`server.auth.key_file`).",
        _all(_is("server.enabled", True), _is("server.auth.kind", "jwt")),
        _has("server.auth.key_file", _TEXT),
    ),
    (
        "`janitor.cron` and `janitor.every_seconds` exclude each other.",
        _has("janitor.cron", {"type": "string"}),
        _not("janitor.every_seconds", {"type": "integer"}),
    ),
    (
        "An Ingress needs a server and host names (`ingress.hosts`).",
        _is("ingress.enabled", True),
        _all(_is("server.enabled", True), _has("ingress.hosts", {"minItems": 1})),
    ),
    (
        "A ServiceMonitor and a PodMonitor together would scrape everything twice.",
        _is("podMonitor.enabled", True),
        _not("serviceMonitor.enabled", {"const": True}),
    ),
    (
        "Addresses must be `HOST:PORT`, because a NetworkPolicy opens the port.",
        {},
        _all(
            _optional("storage.hbase.thrift", {"items": _ADDRESS}),
            _optional("storage.hbase.thrift2", {"items": _ADDRESS}),
            _optional("transactions.thrift", _ADDRESS),
        ),
    ),
    (
        "A store on HBase needs `storage.hbase.thrift`.",
        _is("storage.kind", "hbase"),
        _has("storage.hbase.thrift", {"type": "array"}),
    ),
)
