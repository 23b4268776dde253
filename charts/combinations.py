"""What goes together in the chart's values, and what the schema refuses.

Each combination is said in JSON Schema's own words (``if``, ``then``); the sentence is what an operator reads when
Helm refuses, and what the chart's page lists.
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
        "A LevelDB store is one process's: server and janitor in one pod, with a volume that outlives it.",
        _is("storage.kind", "leveldb"),
        {"allOf": [_is("mode", "deployment"), _is("server.enabled", True), _is("persistence.enabled", True)]},
    ),
    (
        "A store in memory is gone with its pod.",
        {},
        _is("storage.kind", "leveldb", "hbase"),
    ),
    (
        "A LevelDB store's transactions are managed by its server; Spark cannot read it.",
        _is("storage.kind", "leveldb"),
        {"allOf": [_is("transactions.source", "manager", "none"), {"not": _is("spark.enabled", True)}]},
    ),
    (
        "Only the server manages transactions.",
        {"allOf": [_is("transactions.source", "manager")]},
        _is("server.enabled", True),
    ),
    (
        "The manager's log needs a volume that outlives the pod.",
        _all(_MANAGES_IN_VOLUME, _is("server.enabled", True)),
        _is("persistence.enabled", True),
    ),
    (
        "The server answers to other pods, so it has to know who asks.",
        _is("server.enabled", True),
        _is("server.auth.kind", "tokens", "jwt"),
    ),
    (
        "The transaction service answers to other pods, so it has a `token_file`, or `allow_without_token` says so.",
        _all(
            _is("transactions.source", "manager"),
            {"anyOf": [_is("storage.kind", "hbase"), _holds("transactions.thrift", {"not": _LOOPBACK_PORT})]},
        ),
        {"anyOf": [_holds("transactions.token_file", _GIVEN), _is("transactions.allow_without_token", True)]},
    ),
    (
        "Several servers share neither a store in a volume nor a manager's log in one; that of theirs is in HBase.",
        _SEVERAL,
        {"allOf": [_is("storage.kind", "hbase"), _is("transactions.source", "manager", "thrift", "none")]},
    ),
    (
        "Spark takes an image that has it.",
        _is("spark.enabled", True),
        {"properties": {"spark": {"properties": {"image": {"minLength": 1}}}}},
    ),
    (
        "An archive needs a volume that outlives the pod.",
        _ARCHIVES,
        _all(_is("persistence.enabled", True), _holds("janitor.archive.path", _KEPT)),
    ),
    (
        "A store in a volume is in `/var/lib/tms`, and so is what the janitor remembers of it.",
        _is("storage.kind", "leveldb"),
        _all(_holds("storage.leveldb.path", _KEPT), _holds("janitor.state", _KEPT)),
    ),
    (
        "The log of a single server's manager is in `/var/lib/tms`.",
        _MANAGES_IN_VOLUME,
        _holds("transactions.directory", _KEPT),
    ),
    (
        "What two pods mount, an archive beside a manager's log or beside Spark's sweeps, is `ReadWriteMany`.",
        _all(
            _is("storage.kind", "hbase"),
            _ARCHIVES,
            {"anyOf": [_MANAGES_IN_VOLUME, _SPARK_SWEEPS]},
        ),
        _holds("persistence.accessModes", {"contains": {"const": "ReadWriteMany"}}),
    ),
    (
        "Workers of `spark://…` and `sc://…` mount no volume of the chart's, so no sweep of theirs has an archive.",
        _all(_ARCHIVES, _SPARK_SWEEPS),
        _never("spark.master", {"pattern": "^(spark|sc)://"}),
    ),
    (
        "Decisions about a store in a volume are carried out by a second pod, so the volume is not `ReadWriteOncePod`.",
        _all(
            _is("storage.kind", "leveldb"),
            {"anyOf": [_holds("decisions.adopt", _GIVEN), _holds("decisions.approve", {"minItems": 1})]},
        ),
        _never("persistence.accessModes", {"contains": {"const": "ReadWriteOncePod"}}),
    ),
    (
        "A daemon never lets go of the lease, so Spark sweeps with `mode: cronjob` only.",
        _all(_is("mode", "deployment"), _is("spark.enabled", True)),
        _never("spark.command", _SWEEP),
    ),
    (
        "Pods are reached from outside, at ports that are known: no loopback address, and no port 0.",
        {},
        _all(
            _never("janitor.http.port", {"const": 0}),
            _never("server.port", {"const": 0}),
            _never("janitor.http.host", _LOOPBACK),
            _never("server.host", _LOOPBACK),
        ),
    ),
    (
        "On HBase the manager of transactions listens at 15165, so the server does not.",
        _all(_is("storage.kind", "hbase"), _is("transactions.source", "manager")),
        _never("server.port", {"const": 15165}),
    ),
    (
        "Tokens are in a file (`server.auth.tokens_file`).",
        _all(_is("server.enabled", True), _is("server.auth.kind", "tokens")),
        _holds("server.auth.tokens_file", _GIVEN),
    ),
    (
        "So are keys for `jwt` (`server.auth.key_file`).",
        _all(_is("server.enabled", True), _is("server.auth.kind", "jwt")),
        _holds("server.auth.key_file", _GIVEN),
    ),
    (
        "`janitor.cron` and `janitor.every_seconds` exclude each other.",
        _holds("janitor.cron", {"type": "string"}),
        _never("janitor.every_seconds", {"type": "integer"}),
    ),
    (
        "An Ingress leads to the server, by names (`ingress.hosts`).",
        _is("ingress.enabled", True),
        _all(_is("server.enabled", True), _holds("ingress.hosts", {"minItems": 1})),
    ),
    (
        "A ServiceMonitor and a PodMonitor would scrape everything twice.",
        _is("podMonitor.enabled", True),
        _never("serviceMonitor.enabled", {"const": True}),
    ),
    (
        "Addresses are `HOST:PORT`, since a NetworkPolicy opens that port.",
        {},
        _all(
            _within("storage.hbase.thrift", {"items": _ADDRESS}),
            _within("storage.hbase.thrift2", {"items": _ADDRESS}),
            _within("transactions.thrift", _ADDRESS),
        ),
    ),
    (
        "On HBase its Thrift servers are named.",
        _is("storage.kind", "hbase"),
        _holds("storage.hbase.thrift", {"type": "array"}),
    ),
)
