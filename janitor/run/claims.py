"""What is claimed of a store, what stands in the way of a claim, and the audit that tests it (rule S4)."""

from __future__ import annotations

from janitor.boundary import claim as boundary
from janitor.inspect.rows import Audit, Heartbeat
from janitor.inspect.rows import audit as read_all
from janitor.run.deps import Deps
from janitor.run.prepare import Prepared
from janitor.state.base import Claim


def claim_in_force(deps: Deps, ready: Prepared) -> Claim | None:
    """The claim in force: not of another store, nor by a clock set back since, nor with a lifetime raised since.

    Raises:
        StateError: the state could not be read.
    """
    claim = deps.state.claim()
    if claim is None or ready.first_contact or ready.speaks_against(claim):
        return None
    now_ms, evidence = deps.clock.now_ms(), deps.state.evidence()
    return claim if boundary.in_force(claim, evidence, now_ms, deps.terms.lifetime) else None


def obstacles(deps: Deps, ready: Prepared) -> list[str]:
    """Why nothing can be claimed, whatever the evidence."""
    found = list(deps.store.obstacles())
    if ready.first_contact:
        found.append("this store, with these transactions, has not been adopted")
    if not deps.terms.lifetime_known:
        found.append(
            "transactions.max_lifetime_seconds is not set, so it is not known how long a transaction may write; "
            "set it to what the servers enforce (data.tx.max.lifetime)"
        )
    if ready.tx.usable is None:
        found.append(ready.tx.message)
    return found


def audit(deps: Deps, ready: Prepared, heartbeat: Heartbeat) -> Audit:
    """Read every transactional row, and hold it against the claim.

    Raises:
        StoreError, StateError: the store or the state could not be read.
    """
    usable, claim = ready.tx.usable, claim_in_force(deps, ready)
    known = deps.state.known_ids(ready.now.wall_ms, deps.terms.lifetime.window_end_ms(0))
    return read_all(
        # Each part by itself: a key may be there under a second salt, which the whole shows once.
        [part.message for part in deps.store.parts()],
        claim.bound if claim else None,
        lambda pointer: pointer in known or (usable is not None and usable.is_invalid(pointer)),
        heartbeat,
    )
