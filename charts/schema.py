"""The chart's ``values.schema.json`` and the page with its values, from the settings' models.

What the chart writes into the settings file has to be what the program reads. So the sections ``storage``,
``transactions``, ``server`` and ``janitor`` of the schema are the program's own models, and only what is Kubernetes'
affair is described here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from janitor.monitoring import THRESHOLDS
from janitor.settings import Settings
from tms_core.layered import extra, fields, text

CHART = Path(__file__).with_name("tms-janitor")

Schema = dict[str, Any]

_SECTIONS = ("storage", "transactions", "server", "janitor")
_NOTHING_ELSE = {"additionalProperties": False}
_TEXT: Schema = {"type": "string"}
_SWITCH: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_OBJECTS: Schema = {"type": "array", "items": _OBJECT}
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}
#: Labels without the chart's own, by which some of its objects find each other.
_OWN_LABELS = r"^(app\.kubernetes\.io/(name|instance|component|version|managed-by)|helm\.sh/chart)$"
_LABELS: Schema = {**_TEXTS, "patternProperties": {_OWN_LABELS: False}}
_VARIABLE: Schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "value": _TEXT, "valueFrom": _OBJECT},
    "required": ["name"],
    "additionalProperties": False,
}
_QUANTITY = {"anyOf": [{"type": "string", "pattern": r"^[0-9.]+(m|[EPTGMk]i?)?$"}, {"type": "number", "minimum": 0}]}
_PEERS: Schema = {"type": "array", "items": _OBJECT}


def _whole(least: int = 0) -> Schema:
    return {"type": "integer", "minimum": least}


def _one_of(*choices: str) -> Schema:
    return {"enum": list(choices)}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, **_NOTHING_ELSE}


_RESOURCES = _object(
    requests={"type": "object", "additionalProperties": _QUANTITY},
    limits={"type": "object", "additionalProperties": _QUANTITY},
    claims=_OBJECTS,
)
_CRON: Schema = {"type": "string", "pattern": r"^(@\w+|\S+ \S+ \S+ \S+ \S+)$"}

#: What is Kubernetes' affair, by its name in the values.
_OWN: dict[str, Schema] = {
    "mode": _one_of("deployment", "cronjob"),
    "image": _object(
        registry=_TEXT,
        repository={"type": "string", "minLength": 1},
        tag=_TEXT,
        digest={"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
        pullPolicy=_one_of("Always", "IfNotPresent", "Never"),
    ),
    "imagePullSecrets": _OBJECTS,
    "nameOverride": _TEXT,
    "fullnameOverride": _TEXT,
    "commonLabels": _LABELS,
    "decisions": _object(
        adopt=_TEXT,
        approve={
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"topic": _TEXT, "id": {"type": "string", "minLength": 1}},
                "required": ["id"],
                **_NOTHING_ELSE,
            },
        },
    ),
    "serverReplicas": _whole(1),
    "cronjob": _object(
        schedule=_CRON,
        timeZone=_TEXT,
        startingDeadlineSeconds=_whole(10),
        activeDeadlineSeconds={"anyOf": [_whole(1), {"type": "null"}]},
        backoffLimit=_whole(),
        successfulJobsHistoryLimit=_whole(),
        failedJobsHistoryLimit=_whole(),
        suspend=_SWITCH,
    ),
    "spark": _object(
        enabled=_SWITCH,
        command={"type": "array", "items": _TEXT, "minItems": 1},
        schedule=_CRON,
        master={"type": "string", "pattern": r"^(local(\[[^\]]+\])?|spark://.+|k8s://.+|sc://.+)$"},
        conf=_OBJECT,
        image=_TEXT,
        resources=_RESOURCES,
    ),
    "persistence": _object(
        enabled=_SWITCH,
        existingClaim=_TEXT,
        storageClass=_TEXT,
        accessModes={
            "type": "array",
            "items": _one_of("ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"),
            "minItems": 1,
        },
        size=_QUANTITY,
        annotations=_TEXTS,
    ),
    "serviceAccount": _object(create=_SWITCH, name=_TEXT, annotations=_TEXTS),
    "serverService": _object(type=_one_of("ClusterIP", "NodePort", "LoadBalancer"), annotations=_TEXTS),
    "service": _object(annotations=_TEXTS),
    "serviceMonitor": _object(
        enabled=_SWITCH,
        namespace=_TEXT,
        labels=_LABELS,
        interval=_TEXT,
        scrapeTimeout=_TEXT,
        relabelings=_OBJECTS,
        metricRelabelings=_OBJECTS,
        serverAuthorization=_OBJECT,
        serverTlsConfig=_OBJECT,
    ),
    "prometheusRule": _object(
        enabled=_SWITCH,
        job={"type": "string", "pattern": "^[A-Za-z0-9_./:-]*$"},
        namespace=_TEXT,
        labels=_LABELS,
        ruleLabels=_TEXTS,
        runbookUrl={"type": "string", "pattern": r"^https?://\S+$"},
        thresholds=_object(**{each.name: {**_whole(), "description": each.meaning} for each in THRESHOLDS}),
    ),
    "dashboard": _object(enabled=_SWITCH, namespace=_TEXT, labels=_LABELS, annotations=_TEXTS),
    "networkPolicy": _object(
        enabled=_SWITCH,
        metricsFrom=_PEERS,
        clientsFrom=_PEERS,
        storeTo=_PEERS,
        apiServerPorts={"type": "array", "items": _whole(1)},
        extraEgress=_OBJECTS,
    ),
    "podDisruptionBudget": _object(enabled=_SWITCH, maxUnavailable=_whole()),
    "resources": _RESOURCES,
    "podSecurityContext": _OBJECT,
    "securityContext": _OBJECT,
    "terminationGracePeriodSeconds": _whole(1),
    "probePeriodSeconds": _whole(1),
    "startupSeconds": _whole(5),
    "extraEnv": {"type": "array", "items": _VARIABLE},
    "extraEnvFrom": _OBJECTS,
    "extraVolumes": _OBJECTS,
    "extraVolumeMounts": _OBJECTS,
    "existingSecret": _TEXT,
    "podAnnotations": _TEXTS,
    "podLabels": _LABELS,
    "nodeSelector": _TEXTS,
    "tolerations": _OBJECTS,
    "affinity": _OBJECT,
    "topologySpreadConstraints": _OBJECTS,
    "priorityClassName": _TEXT,
    "global": _OBJECT,
}


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


def _kept(values: Schema) -> Schema:
    """That what has a value by default is not taken away (``null``), which the templates could not do without."""
    values = {name: value for name, value in values.items() if name not in _FREE and value not in (None, "", [], {})}
    inner = {name: _kept(value) for name, value in values.items() if isinstance(value, dict)}
    return {"required": list(values), "properties": inner}


_GIVEN: Schema = {"type": "string", "minLength": 1}
#: What may be taken away from the values, and what is in it.
_FREE = {"annotations", "labels", "resources", "podSecurityContext", "securityContext", "hbase", "leveldb"}
_LOOPBACK: Schema = {"pattern": r"^(127\.|localhost$|::1$)"}
#: In the volume, wherever it is mounted.
_KEPT: Schema = {"pattern": r"^/var/lib/tms/[^./]"}
_ADDRESS: Schema = {"pattern": r"^(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$"}
_SWEEP: Schema = {"contains": {"const": "sweep"}}
_SPARK_SWEEPS = _all(_is("spark.enabled", True), _holds("spark.command", _SWEEP))
_ARCHIVES = _is("janitor.archive.enabled", True)

#: What goes together: what is said when it does not, if, then.
_COMBINATIONS: tuple[tuple[str, Schema, Schema], ...] = (
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
        {"allOf": [_is("transactions.source", "manager"), _is("server.enabled", True)]},
        _is("persistence.enabled", True),
    ),
    (
        "The server answers to other pods, so it has to know who asks.",
        _is("server.enabled", True),
        _is("server.auth.kind", "tokens", "jwt"),
    ),
    (
        "Several servers share neither a store in a volume nor a manager's log.",
        {"properties": {"serverReplicas": {"minimum": 2}}, "required": ["serverReplicas"]},
        {"allOf": [_is("storage.kind", "hbase"), _is("transactions.source", "thrift", "none")]},
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
        "The manager's log is in `/var/lib/tms`.",
        _is("transactions.source", "manager"),
        _holds("transactions.directory", _KEPT),
    ),
    (
        "What two pods mount, an archive beside a manager's log or beside Spark's sweeps, is `ReadWriteMany`.",
        _all(
            _is("storage.kind", "hbase"),
            _ARCHIVES,
            {"anyOf": [_is("transactions.source", "manager"), _SPARK_SWEEPS]},
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
        "Never two sweepers: on HBase a janitor holds a lease.",
        _is("storage.kind", "hbase"),
        _never("janitor.lease.kind", {"const": "none"}),
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
        "Several servers reach each other by their pods' addresses, which no certificate names: end TLS before them.",
        {"properties": {"serverReplicas": {"minimum": 2}}, "required": ["serverReplicas"]},
        _never("server.tls", _OBJECT),
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
        _holds("janitor.cron", _TEXT),
        _never("janitor.every_seconds", {"type": "integer"}),
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


def schema() -> Schema:
    """The schema of the chart's values."""
    made = Settings.model_json_schema()
    kinds = {name: _plain(kind) for name, kind in made["$defs"].items()}
    kinds["ServerSettings"]["properties"]["enabled"] = {**_SWITCH, "description": "whether the chart runs it"}
    own = _described(_OWN)
    sections = {name: {"$ref": made["properties"][name]["$ref"]} for name in _SECTIONS}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of tms-janitor",
        "type": "object",
        "properties": {**sections, **own},
        **_NOTHING_ELSE,
        "allOf": [
            _kept(_values()),
            *({"description": why, "if": when, "then": then} for why, when, then in _COMBINATIONS),
        ],
        "$defs": kinds,
    }


def _plain(node: Any) -> Any:
    """A model's schema without what only the settings' own page needs."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    dropped = {"place", "reason", "title", "unit"} if "properties" not in node or "type" in node else set()
    found = {key: _plain(value) for key, value in node.items() if key not in dropped or isinstance(value, dict)}
    if isinstance(found.get("unit"), str):
        del found["unit"]
    return found


def _described(own: dict[str, Schema]) -> dict[str, Schema]:
    """What the comments of the values say, in the schema too; so an editor shows it."""
    said = comments()
    found = json.loads(json.dumps(own))
    for path, meaning in said.items():
        node, *rest = path.split(".")
        place = found.get(node)
        for name in rest:
            place = place and place.get("properties", {}).get(name)
        if place is not None:
            place["description"] = meaning
    return dict(found)


def _values() -> Any:
    return yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


def comments() -> dict[str, str]:
    """What ``values.yaml`` says of each value, by its path: the comment ``# -- …`` above it."""
    found, said, path = {}, "", list[str]()
    for line in (CHART / "values.yaml").read_text(encoding="utf-8").splitlines():
        if match := re.match(r" *# -- (.+)", line):
            said = match[1]
        elif match := re.match(r"( *)([\w.-]+):", line):
            path = [*path[: len(match[1]) // 2], match[2]]
            if said:
                found[".".join(path)] = said
            said = ""
    return found


# --- the page --------------------------------------------------------------------------------------------------------

_HEAD = """\
# tms-janitor

Made by `python -m charts.generate`; change `values.yaml`, the settings' models or `charts/schema.py`, not this page.

Cleans CDAP's Transactional Messaging System in HBase from outside, or serves and cleans a store of its own in a volume.
How to install it, look at the plan, switch on, upgrade and roll back: `docs/kubernetes.md`. What to do when an alert
fires: `docs/operations.md`.

    helm install janitor charts/tms-janitor --set 'storage.hbase.thrift={thrift-1:9090,thrift-2:9090}'

installs a daemon that plans and deletes nothing. `helm test janitor` asks it whether it is well. Files under `ci/` are
examples of values; each is installed by a test.

## Values

| value | default | meaning |
|---|---|---|
"""

_COMBINED = """
## What goes together

The schema refuses anything else, and one pod's ports being the same is refused by the templates.

"""

_SETTINGS = """
## Settings

Under `storage`, `transactions`, `server` and `janitor` stand the settings of the program as they are in its file; the
defaults are those of the program, or of the table above where there are others. `docs/configuration.md` has the
reasons.

| value | default | meaning |
|---|---|---|
"""

_FIGURES = """
## Figures of the alerts

`prometheusRule.thresholds` has other defaults with `mode: cronjob`, where runs are started from outside, once a day at
least. Where that is done every hour, as by `cronjob.schedule` unless you say otherwise, 10800 for `downSeconds`,
`newSeconds`, `successSeconds`, `windowSeconds` and `snapshotSeconds` tells of runs that fail within three hours instead
of a day. A daemon's figures grow with `janitor.every_seconds`, and some are those of CronJobs with `janitor.cron`.

| value | deployment | cronjob | meaning |
|---|---|---|---|
"""


def page() -> str:
    """The chart's README."""
    values = _values()
    own = [_row(path, _at(values, path), meaning) for path, meaning in comments().items()]
    told = [f"- {why}" for why, _, _ in _COMBINATIONS]
    settings = [
        _row(path, "must be given" if field.is_required() else field.default, _with_unit(field))
        for path, field in fields(Settings)
    ]
    figures = [f"| `{each.name}` | {each.daemon} | {each.cronjob} | {each.meaning} |" for each in THRESHOLDS]
    parts = [_HEAD, *own, _COMBINED, *told, _SETTINGS, *settings, _FIGURES, *figures]
    return "".join(part if part.startswith(("#", "\n#")) else f"{part}\n" for part in parts)


def _with_unit(field: Any) -> str:
    unit = extra(field, "unit")
    return f"{field.description} ({unit})" if unit else str(field.description)


def _row(path: str, default: object, meaning: str) -> str:
    return f"| `{path}` | `{text(default)}` | {meaning} |"


def _at(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values[name]
    return values
