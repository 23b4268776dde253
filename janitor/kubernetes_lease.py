"""The lease as a Kubernetes Lease, for clusters where that is where one looks for who leads.

It is the same lease as ever (``tms_core.lease``): the record is an annotation of the Lease, compared and set by its
resource version, and the fields that ``kubectl get leases`` shows are written beside it for people. Its times are not
believed: the record's holder is over when it has been watched for as long as it lasts, as everywhere.

The memory has to know who holds it, too, because it refuses what a former holder has learnt. So every record that is
written here is written there after it; one that comes too late for that finds a higher fence there and leaves it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException
from urllib3.exceptions import HTTPError

from tms_core.errors import ConfigurationError, StoreError
from tms_core.lease import LeaseCell, LeaseRecord

#: The annotation that holds the record.
RECORD = "tms-janitor/lease"
#: How long one call may take, in seconds: well within the time a lease lasts.
TIMEOUT_SECONDS = 10
#: Where a pod finds the name of its namespace.
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

_ABSENT, _CONFLICT = 404, 409
_REFUSED = (401, 403)


class KubernetesCell:
    """A Lease of the cluster as the place of a lease (``tms_core.lease.LeaseCell``).

    Args:
        name: the Lease's.
        namespace: its namespace; None: that of the pod.
        namespace_file: where a pod finds the name of its own.
        environ: ``os.environ``; says whether this is a pod, and else where the kubeconfig is.

    Raises:
        ConfigurationError: this is no pod and there is no kubeconfig, or nobody knows the namespace.
    """

    def __init__(
        self,
        name: str,
        namespace: str | None,
        namespace_file: Path = NAMESPACE_FILE,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        settings = client.Configuration()
        try:
            if "KUBERNETES_SERVICE_HOST" in environ:
                config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
            else:
                config.load_kube_config(environ.get("KUBECONFIG"), client_configuration=settings)  # type: ignore[no-untyped-call]
        except (ConfigException, OSError) as error:
            raise ConfigurationError(
                f"janitor.lease.kind is kubernetes, and the cluster is not known: {error}",
                "Run it in a pod whose service account's token is mounted, or set KUBECONFIG.",
            ) from error
        # A write that is sent twice would find its own first half and think that somebody else was faster.
        settings.retries = False
        self._name = name
        self._namespace = namespace or _namespace(namespace_file)
        # Objects as they are: the library's own models of a Lease drop microseconds, without which it is refused.
        self._api = client.CustomObjectsApi(client.ApiClient(settings))

    @property
    def _leases(self) -> tuple[str, str, str, str]:
        """Where leases are: group, version, namespace, plural."""
        return "coordination.k8s.io", "v1", self._namespace, "leases"

    def lease(self) -> bytes | None:
        """The record; None where there is no Lease, or none of ours in it."""
        return _record(self._read())

    def swap_lease(self, expected: bytes | None, value: bytes) -> bool:
        """Write the record if ``expected`` is still there; returns whether it was."""
        found = self._read()
        if _record(found) != expected:
            return False
        lease = self._written(found, value)
        try:
            with self._asked():
                if found is None:
                    self._api.create_namespaced_custom_object(*self._leases, lease, _request_timeout=TIMEOUT_SECONDS)
                else:
                    self._api.replace_namespaced_custom_object(
                        *self._leases, self._name, lease, _request_timeout=TIMEOUT_SECONDS
                    )
        except _Conflict:
            return False
        return True

    def close(self) -> None:
        """Close the connections."""
        self._api.api_client.close()

    def _read(self) -> Any:
        """The Lease; None without one."""
        try:
            with self._asked():
                return self._api.get_namespaced_custom_object(
                    *self._leases, self._name, _request_timeout=TIMEOUT_SECONDS
                )
        except _Absent:
            return None

    def _written(self, found: Any, value: bytes) -> Any:
        """The Lease with a record in it; where it was read, at the version that was read."""
        record = LeaseRecord.parse(value)
        lease = found or {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._name}}
        metadata = lease["metadata"]
        metadata["annotations"] = {**metadata.get("annotations", {}), RECORD: value.decode()}
        if record is not None:
            # Microseconds are written even where they are 0: without them a time is refused.
            renewed = datetime.fromtimestamp(record.renewed_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            lease["spec"] = {
                "holderIdentity": record.holder or None,
                "leaseDurationSeconds": record.seconds,
                "leaseTransitions": record.fence,
                "renewTime": renewed,
                "acquireTime": lease.get("spec", {}).get("acquireTime", renewed) if record.beat else renewed,
            }
        return lease

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """What the library raises, as errors of ours."""
        try:
            yield
        except ApiException as error:
            if error.status == _ABSENT:
                raise _Absent from error
            if error.status == _CONFLICT:
                raise _Conflict from error
            raise StoreError(
                f"Kubernetes refused the lease {self._namespace}/{self._name}: {_said(error)}.",
                "Let the pod's service account get and update that Lease (Role and RoleBinding), and mount its token. "
                "If the Lease was deleted, helm upgrade makes it anew."
                if error.status in _REFUSED
                else "Look at the API server's health; it may work later.",
            ) from error
        except (HTTPError, OSError) as error:
            raise StoreError(
                f"Kubernetes did not answer for the lease {self._namespace}/{self._name}: {error}",
                "Look at the API server's health, and whether a network policy lets this pod reach it.",
            ) from error


class Mirrored:
    """A lease in one place, whose records another place is told of.

    Args:
        place: where it is decided who holds it.
        told: the memory, which refuses what a former holder has learnt.
    """

    def __init__(self, place: LeaseCell, told: LeaseCell) -> None:
        self._place = place
        self._told = told

    def lease(self) -> bytes | None:
        """What is there where it is decided."""
        return self._place.lease()

    def swap_lease(self, expected: bytes | None, value: bytes) -> bool:
        """Write it there if ``expected`` is still there, and then tell; returns whether it was written."""
        if not self._place.swap_lease(expected, value):
            return False
        mine = LeaseRecord.parse(value)
        while mine is not None:
            known = self._told.lease()
            record = LeaseRecord.parse(known)
            is_newer = record is not None and record.fence > mine.fence and self._place.lease() != value
            if is_newer or self._told.swap_lease(known, value):
                break
        return True


class _Absent(Exception):
    """There is no such Lease."""


class _Conflict(Exception):
    """Somebody else has written the Lease meanwhile."""


def _record(lease: Any) -> bytes | None:
    record = (lease or {}).get("metadata", {}).get("annotations", {}).get(RECORD)
    return None if record is None else str(record).encode()


def _said(error: ApiException) -> str:
    """The API server's sentence, or else what HTTP says."""
    try:
        return str(json.loads(error.body or "")["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.status} {error.reason}"


def _namespace(file: Path) -> str:
    if file.exists():
        return file.read_text(encoding="utf-8").strip()
    raise ConfigurationError(
        "janitor.lease.kind is kubernetes, and nobody knows in which namespace.", "Set janitor.lease.namespace."
    )
