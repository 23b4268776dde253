"""The generator of the chart's ``values.schema.json``, from the models of the settings.

The chart copies the values under ``storage``, ``transactions``, ``server`` and ``janitor`` to the settings file.
Therefore their schema comes from the program's own models, and this module describes only the values for Kubernetes.
"""

from __future__ import annotations

import json
from typing import Any

from charts.combinations import COMBINATIONS, Schema
from charts.values import comments, defaults
from janitor.settings import AllSettings
from tools.monitoring.rules import ALERTS, THRESHOLDS

_SECTIONS = ("storage", "transactions", "server", "janitor")
_CLOSED = {"additionalProperties": False}
_TEXT: Schema = {"type": "string"}
_SWITCH: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_OBJECTS: Schema = {"type": "array", "items": _OBJECT}
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}
#: The labels that values must not set, because selectors of the chart's objects use them.
_OWN_LABELS = r"^(app\.kubernetes\.io/(name|instance|component|version|managed-by)|helm\.sh/chart)$"
_LABELS: Schema = {**_TEXTS, "patternProperties": {_OWN_LABELS: False}}
_VARIABLE: Schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "value": _TEXT, "valueFrom": _OBJECT},
    "required": ["name"],
    "additionalProperties": False,
}
#: A quantity in Kubernetes' format: 1000 is ``1k``, and 1024 is ``1Ki``.
_QUANTITY = {
    "anyOf": [
        {"type": "string", "pattern": r"^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?$"},
        {"type": "number", "minimum": 0},
    ]
}
_PEERS: Schema = {"type": "array", "items": _OBJECT}


def _whole(least: int = 0) -> Schema:
    return {"type": "integer", "minimum": least}


def _one_of(*choices: str) -> Schema:
    return {"enum": list(choices)}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, **_CLOSED}


_RESOURCES = _object(
    requests={"type": "object", "additionalProperties": _QUANTITY},
    limits={"type": "object", "additionalProperties": _QUANTITY},
    claims=_OBJECTS,
)
#: The values of all pods that each kind of pod can override.
_POD_VALUES: dict[str, Schema] = {
    "resources": _RESOURCES,
    "podAnnotations": _TEXTS,
    "nodeSelector": _TEXTS,
    "tolerations": _OBJECTS,
    "affinity": _OBJECT,
    "topologySpreadConstraints": _OBJECTS,
    "priorityClassName": _TEXT,
    "initContainers": _OBJECTS,
    "extraContainers": _OBJECTS,
}
_PROBES = _object(startupProbe=_OBJECT, livenessProbe=_OBJECT, readinessProbe=_OBJECT)
#: The kinds of pods, which are the names of their containers.
_COMPONENTS = ("janitor", "server", "exporter", "spark", "executor", "adopt", "approve", "test")
_CRON: Schema = {"type": "string", "pattern": r"^(@\w+|\S+ \S+ \S+ \S+ \S+)$"}

#: The schemas of the values for Kubernetes, by name.
_KUBERNETES_VALUES: dict[str, Schema] = {
    "enabled": _SWITCH,
    # Other charts have their global values in the same section, so unknown values are valid.
    "global": {"type": "object", "properties": {"imageRegistry": _TEXT, "imagePullSecrets": _OBJECTS}},
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
    "commonAnnotations": _TEXTS,
    "decisions": _object(
        adopt=_TEXT,
        approve={
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "topic": {"type": "string", "minLength": 1},
                    "all": {"const": True},
                    "clock": {"const": True},
                    "id": {"type": "string", "minLength": 1},
                },
                "required": ["id"],
                "anyOf": [{"required": ["topic"]}, {"required": ["all"]}, {"required": ["clock"]}],
                "not": {"required": ["topic", "all"]},
                **_CLOSED,
            },
        },
        store=_TEXT,
        activeDeadlineSeconds=_whole(1),
        ttlSecondsAfterFinished=_whole(),
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
    "serverService": _object(
        type=_one_of("ClusterIP", "NodePort", "LoadBalancer"),
        annotations=_TEXTS,
        loadBalancerSourceRanges={"type": "array", "items": {"type": "string", "pattern": "/[0-9]+$"}},
        ipFamilyPolicy=_one_of("", "SingleStack", "PreferDualStack", "RequireDualStack"),
    ),
    "ingress": _object(
        enabled=_SWITCH,
        className=_TEXT,
        annotations=_TEXTS,
        hosts={"type": "array", "items": {"type": "string", "minLength": 1}},
        tls=_OBJECTS,
    ),
    "service": _object(annotations=_TEXTS),
    "podMonitor": _object(enabled=_SWITCH, namespace=_TEXT, labels=_LABELS, interval=_TEXT, scrapeTimeout=_TEXT),
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
        runbookUrl={"type": "string", "pattern": r"^(https?://\S+)?$"},
        disabled={"type": "array", "items": _one_of(*(alert.name for alert in ALERTS))},
        thresholds=_object(**{each.name: {**_whole(), "description": each.meaning} for each in THRESHOLDS}),
    ),
    "dashboard": _object(enabled=_SWITCH, namespace=_TEXT, labels=_LABELS, annotations=_TEXTS),
    "networkPolicy": _object(
        enabled=_SWITCH,
        metrics=_SWITCH,
        metricsFrom=_PEERS,
        clientsFrom=_PEERS,
        transactionsFrom=_PEERS,
        storeTo=_PEERS,
        apiServerPorts={"type": "array", "items": _whole(1)},
        extraEgress=_OBJECTS,
    ),
    "podDisruptionBudget": _object(enabled=_SWITCH, maxUnavailable=_whole()),
    **_POD_VALUES,
    "components": _object(**{name: _object(**_POD_VALUES, probes=_PROBES) for name in _COMPONENTS}),
    "extraObjects": _OBJECTS,
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
    "krb5Conf": _TEXT,
    "podLabels": _LABELS,
    "revisionHistoryLimit": _whole(),
    "dnsConfig": _OBJECT,
    "hostAliases": _OBJECTS,
}


#: The values that may be null, and whose contents may be null.
_NULLABLE = {"annotations", "labels", "resources", "podSecurityContext", "securityContext", "hbase", "leveldb"}


def _reject_null(values: Schema) -> Schema:
    """Return a schema that rejects null for values with a default, because the templates need these values."""
    values = {
        name: value for name, value in values.items() if name not in _NULLABLE and value not in (None, "", [], {})
    }
    inner = {name: _reject_null(value) for name, value in values.items() if isinstance(value, dict)}
    return {"required": list(values), "properties": inner}


def _explain(then: Schema, why: str) -> Schema:
    """Return a schema equal to ``then`` whose error has the sentence ``why``, because no values equal that text."""
    return {"anyOf": [then, {"const": why}]}


def schema() -> Schema:
    """Return the schema of the chart's values."""
    model = AllSettings.model_json_schema()
    kinds = {name: _plain(kind) for name, kind in model["$defs"].items()}
    kinds["ServerSettings"]["properties"]["enabled"] = {**_SWITCH, "description": "whether the chart runs it"}
    own = _add_descriptions(_KUBERNETES_VALUES)
    sections = {name: {"$ref": model["properties"][name]["$ref"]} for name in _SECTIONS}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of tms-janitor",
        "type": "object",
        "properties": {**sections, **own},
        **_CLOSED,
        "allOf": [
            _reject_null(defaults()),
            *({"if": when, "then": _explain(then, why)} for why, when, then in COMBINATIONS),
        ],
        "$defs": kinds,
    }


def _plain(node: Any) -> Any:
    """Return the schema of a model without the fields for the reference of settings."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    dropped = {"place", "reason", "title", "unit"} if "properties" not in node or "type" in node else set()
    found = {key: _plain(value) for key, value in node.items() if key not in dropped or isinstance(value, dict)}
    if isinstance(found.get("unit"), str):
        del found["unit"]
    return found


def _add_descriptions(own: dict[str, Schema]) -> dict[str, Schema]:
    """Return the schemas with the values' comments as descriptions, which editors show."""
    descriptions = comments()
    found = json.loads(json.dumps(own))
    for path, meaning in descriptions.items():
        node, *rest = path.split(".")
        place = found.get(node)
        for name in rest:
            place = place and place.get("properties", {}).get(name)
        if place is not None:
            place["description"] = meaning
    return dict(found)
