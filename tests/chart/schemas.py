"""Recorded JSON schemas of API servers for kubeconform, so that tests need no API server.

They are those of the oldest and newest supported versions, and of the node in ``tests/cluster``.
``tests/cluster/test_plane.py`` compares the node's schemas with a real API server, and prints how to record them again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("recorded")
#: The schemas of the node that tests start.
FOLDER = RECORDED / "1.35"
#: Group, version and kind of the chart's objects.
KINDS = (
    ("", "v1", "ConfigMap"),
    ("", "v1", "PersistentVolumeClaim"),
    ("", "v1", "Pod"),
    ("", "v1", "Service"),
    ("", "v1", "ServiceAccount"),
    ("apps", "v1", "Deployment"),
    ("apps", "v1", "StatefulSet"),
    ("batch", "v1", "CronJob"),
    ("batch", "v1", "Job"),
    ("networking.k8s.io", "v1", "Ingress"),
    ("networking.k8s.io", "v1", "NetworkPolicy"),
    ("policy", "v1", "PodDisruptionBudget"),
    ("rbac.authorization.k8s.io", "v1", "Role"),
    ("rbac.authorization.k8s.io", "v1", "RoleBinding"),
)

_NAMES = "_definitions.json"
_REF = "#/definitions/"
#: The server also accepts numbers, which its schema does not say.
_QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"


def record(openapi: dict[str, Any]) -> dict[str, str]:
    """Return the schemas as contents of files by name.

    Args:
        openapi: the API server's response to ``/openapi/v2``.
    """
    definitions = openapi["definitions"]
    by_kind = {
        (each["group"], each["version"], each["kind"]): name
        for name, definition in definitions.items()
        for each in definition.get("x-kubernetes-group-version-kind", ())
    }
    wanted = {kind: by_kind[kind] for kind in KINDS}
    reached = dict(_reached(definitions, wanted.values()))
    shrunk = {name: _strict(definition) for name, definition in sorted(reached.items())}
    shrunk[_QUANTITY] = {"type": ["string", "number"]}
    files = {_NAMES: json.dumps({"definitions": shrunk}, separators=(",", ":"), sort_keys=True) + "\n"}
    for (group, version, kind), name in wanted.items():
        suffix = "-".join(filter(None, [kind.lower(), group.partition(".")[0], version]))
        files[f"{suffix}.json"] = json.dumps({"$ref": f"{_NAMES}{_REF}{name}"}) + "\n"
    return files


def _reached(definitions: dict[str, Any], names: Any) -> Iterator[tuple[str, Any]]:
    """Yield each definition that these definitions refer to, once."""
    todo, seen = list(names), set()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            yield name, definitions[name]
            todo += re.findall(rf'"{_REF}([^"]+)"', json.dumps(definitions[name]))


def _strict(node: Any) -> Any:
    """Return a definition without descriptions that rejects unknown fields."""
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("format") == "int-or-string":
        return {"type": ["string", "integer"]}
    found: dict[str, Any] = {}
    for key, value in node.items():
        if key == "properties":
            found[key] = {name: _strict(inner) for name, inner in value.items()}
        elif key == "$ref":
            found[key] = _NAMES + value if value.startswith("#") else value
        elif key in ("description", "format") or key.startswith("x-"):
            continue
        else:
            found[key] = _strict(value)
    if "properties" in found:
        found["additionalProperties"] = False
    return found
