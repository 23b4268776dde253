"""How a command comes by the lease on a store: where it is kept, and whether one waits for it (rule S12)."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from importlib.util import find_spec
from threading import Event

from janitor.settings import LeaseSettings
from janitor.state.base import State
from tms_core.clock import Clock
from tms_core.errors import ConfigurationError, LeaseHeld
from tms_core.lease import Lease, LeaseCell

logger = logging.getLogger(__name__)

#: How often a janitor on standby looks whether the lease is free, in seconds.
STANDBY_SECONDS = 5.0


@contextmanager
def held(wanted: LeaseSettings, state: State, clock: Clock, *, sole: bool, standby: Event | None) -> Iterator[Lease]:
    """The lease, held while the block runs.

    Args:
        wanted: where it is kept, and how long it lasts.
        state: the store's memory.
        sole: no other holder can be alive.
        standby: until this is set one waits while somebody else has it; None: one does not wait.

    Raises:
        LeaseHeld: somebody else has it.
        ConfigurationError: it is to be in Kubernetes, and there is none.
    """
    holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    with _kubernetes_cell(wanted, state) if wanted.kind == "kubernetes" else nullcontext(state) as cell:
        lease = Lease(cell, holder, wanted.seconds, clock)
        if standby is None:
            lease.acquire(sole=sole)
        else:
            _wait_for(lease, standby)
        try:
            yield lease
        finally:
            lease.release()


def _wait_for(lease: Lease, end: Event) -> None:
    """Wait until the lease is free; whoever watches its holder fall silent need not go by wall clocks (rule S12)."""
    told = False
    while True:
        try:
            lease.acquire()
        except LeaseHeld as held:
            if not told:
                logger.warning("on standby: %s This one goes on when it is free.", held.message)
            told = True
            if end.wait(STANDBY_SECONDS):
                raise
        else:
            return


@contextmanager
def _kubernetes_cell(wanted: LeaseSettings, state: State) -> Iterator[LeaseCell]:
    """Where a Kubernetes Lease is, and the memory told of it.

    Raises:
        ConfigurationError: the library is not installed, or there is no cluster.
    """
    if find_spec("kubernetes") is None:
        raise ConfigurationError(
            "janitor.lease.kind is kubernetes, which needs the kubernetes package, and that is not installed.",
            "Install tms-janitor[kubernetes], or set janitor.lease.kind: store.",
        )
    # Loading it takes longer than all the rest.
    from janitor.kubernetes_lease import KubernetesCell, Mirrored  # noqa: PLC0415

    with closing(KubernetesCell(wanted.name, wanted.namespace)) as cell:
        yield Mirrored(cell, state)
