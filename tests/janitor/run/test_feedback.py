"""Feedback: only proven ids leave the manager's invalid list, and only without obstacles."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from janitor.inspect import rows as inspect
from janitor.report import Report
from janitor.run import feedback
from janitor.run.feedback import proven_ids, reason_to_withhold
from janitor.run.log import RunLog
from janitor.run.prepare import Feedback, Truncator
from janitor.state.base import EVERYTHING
from janitor.status.collect import Deployment, collect
from janitor.sweep.executor import never
from tests.builders import DAY, HOUR, NOW_MS, Kit, janitor, pointer, topic
from tms_core.clock import ManualClock
from tms_core.errors import NoSnapshot, StoreError
from tms_core.messaging.model import FetchRequest
from tms_core.messaging.service import MessagingService, ServiceOptions
from tms_core.rowkey import MessageKey
from tms_core.tables.base import CELLS, MessageValue, Store
from tms_core.tables.lease import Lease
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicId
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage
from tms_core.transaction.model import VisibilityState
from tms_core.transaction.rpc.client import TransactionClient
from tms_core.transaction.rpc.connection import ServiceUnavailable
from tms_core.transaction.rpc.service import TransactionService
from tms_core.transaction.source.source import Loaded

ORDERS = TopicId.parse("default:orders")


@dataclass
class FeedbackKit:
    """A server, its transaction manager and a janitor on one store, with one clock.

    Attributes:
        aborted: pointers of the invalid transactions, in order.
    """

    store: Store
    clock: ManualClock
    manager: TransactionManager
    service: MessagingService
    janitor: Kit
    aborted: list[int] = field(default_factory=list)

    def publish_invalid(self, body: bytes = b"aborted") -> int:
        """Publish in a transaction that then becomes invalid."""
        pointer = self.manager.start_short().write_pointer
        self.service.publish(ORDERS, [body], pointer=pointer)
        self.manager.invalidate(pointer)
        self.aborted.append(pointer)
        self.clock.advance(1000)
        return pointer

    def commit(self, body: bytes = b"committed") -> None:
        transaction = self.manager.start_short()
        self.service.publish(ORDERS, [body], pointer=transaction.write_pointer)
        self.manager.commit(transaction.transaction_id)
        self.clock.advance(1000)

    def read(self) -> list[bytes]:
        """Return the messages that a new transaction reads."""
        transaction = self.manager.start_short()
        pages = self.service.fetch(ORDERS, FetchRequest(transaction=transaction))
        found = [message.payload or b"" for page in pages for message in page]
        self.manager.abort(transaction)
        return found

    def invalid(self) -> list[int]:
        return list(self.manager.visibility().invalid)

    def pointers(self) -> list[int]:
        return [cell.pointer for cell in self.store.message.read(CELLS, b"", None, 1_000_000).items]

    def plant(self, pointer: int) -> None:
        """Put an unexpected row after all other rows."""
        key = MessageKey(ORDERS, 1, self.clock.now_ms(), 0).pack()
        self.store.message.put([(key, MessageValue(pointer, b"planted"))])
        self.clock.advance(1000)

    def with_feedback(self, manager: Truncator | None = None, *participants: str, **options: Any) -> Kit:
        proxy = Feedback(manager or self.manager, participants or ("messaging",))
        self.janitor = self.janitor.restart(feedback=proxy, **options)
        return self.janitor

    def run(self) -> Report:
        return self.janitor.engine.run_once()

    def prove(self, *, days: int = 1) -> None:
        """Let a full run prove all ids without feedback to the manager."""
        self.run()
        self.clock.advance(days * DAY)
        assert self.run().boundary is not None
        assert self.invalid() == self.aborted


@pytest.fixture
def make_kit(stack: ExitStack) -> Callable[[Store], FeedbackKit]:
    def make(store: Store) -> FeedbackKit:
        clock = ManualClock(NOW_MS, monotonic_ms=DAY)
        stack.enter_context(store)
        manager = stack.enter_context(TransactionManager(MemoryStorage(), clock))
        service = stack.enter_context(
            MessagingService(
                store, clock, ServiceOptions(max_lifetime_seconds=3600, grace_seconds=3600), side=MemorySide()
            )
        )
        service.create_topic(ORDERS, {"ttl": str(365 * 86_400)})
        kit = janitor(store, clock=clock, snapshots=manager, hold_seconds=0).adopt()
        return FeedbackKit(store, clock, manager, service, kit)

    return make


@pytest.fixture
def kit(make_kit: Callable[[Store], FeedbackKit]) -> FeedbackKit:
    return make_kit(MemoryStore())


@pytest.fixture
def ready(kit: FeedbackKit) -> FeedbackKit:
    """Return a kit with two proven transactions that are still on the list."""
    kit.commit()
    kit.publish_invalid()
    kit.publish_invalid()
    kit.prove()
    return kit


@dataclass
class ManagerProxy:
    """A proxy of a manager that records truncations, and fails or responds as a test sets it.

    Attributes:
        batches: the number of ids in each call.
        on_call: called before it responds with its list.
    """

    manager: TransactionManager
    batches: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    calls: int = 0
    error: Exception | None = None
    silent: Exception | None = None
    on_call: Callable[[], object] | None = None
    shown: VisibilityState | None = None

    def latest(self) -> Loaded:
        self.calls += 1
        if self.silent is not None:
            raise self.silent
        if self.on_call is not None:
            self.on_call()
        return self.manager.latest() if self.shown is None else Loaded(self.shown, "shown")

    def truncate_invalid(self, transaction_ids: Collection[int], /) -> bool:
        if self.error is not None:
            raise self.error
        self.batches.append(len(transaction_ids))
        self.ids += transaction_ids
        return self.manager.truncate_invalid(transaction_ids)


def messages_of(report: Report) -> list[str]:
    return [note.message for note in report.guards if note.guard == "feedback" and not note.tripped]


@pytest.mark.parametrize("kind", ["memory", "leveldb"])
def test_proven_ids_leave_the_list(make_kit: Callable[[Store], FeedbackKit], kind: str, tmp_path: Path) -> None:
    kit = make_kit(MemoryStore() if kind == "memory" else LevelDBStore(tmp_path / "messaging", create=True))
    kit.with_feedback()
    for day in range(4):
        kit.commit(b"committed on day %d" % day)
        first = kit.publish_invalid()
        second = kit.publish_invalid()
        report = kit.run()
        # The rows of today's invalid transaction are inverted, but its client may still write.
        assert (report.truncated, kit.invalid()) == (2 * bool(day), [first, second])
        assert kit.run().truncated == 0
        kit.clock.advance(DAY - HOUR)
        assert kit.run().truncated == 0
        kit.clock.advance(HOUR)
    report = kit.run()
    assert (report.truncated, kit.invalid(), report.errors, messages_of(report)) == (2, [], [], [])
    assert sorted(filter(lambda pointer: pointer < 0, kit.pointers())) == sorted(-each for each in kit.aborted)
    assert kit.read() == [b"committed on day %d" % day for day in range(4)]
    assert [run.result for run in kit.janitor.state.runs(100)] == ["done"] * 13


def test_run_without_new_proven_ids_does_not_call_the_manager(ready: FeedbackKit) -> None:
    proxy = ManagerProxy(ready.manager)
    ready.with_feedback(proxy)
    assert (ready.run().truncated, proxy.calls) == (2, 1)
    ready.publish_invalid()
    before = ready.store.calls["cells"]
    assert (ready.run().truncated, proxy.calls, proxy.ids) == (0, 1, ready.aborted[:2])
    assert ready.store.calls["cells"] - before <= 1, "the search for the open transaction, and no audit"


def test_id_within_the_boundary_that_is_not_closed_stays_listed(ready: FeedbackKit) -> None:
    first, last = ready.aborted
    seen = ready.manager.visibility()
    never_met = first + 1
    proxy = ManagerProxy(
        ready.manager, shown=VisibilityState(0, 0, seen.write_pointer, array("q", [first, never_met, last]))
    )
    ready.with_feedback(proxy)
    assert (ready.run().truncated, proxy.ids) == (2, [first, last])


def test_verify_reads_each_part_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = MemoryStore(), MemoryStore()
    for store in stores:
        topic(store, "default:orders", ttl_seconds=60).tx(pointer(NOW_MS - HOUR), NOW_MS)
    monkeypatch.setattr(stores[0], "parts", lambda: stores)
    assert janitor(stores[0]).engine.verify().cells == 2


def test_proven_ids_exclude_closed_ids_above_the_boundary() -> None:
    listed, closed = array("q", [3, 5, 7, 9]), array("q", [1, 5, 7, 9])
    assert [list(proven_ids(listed, closed, bound)) for bound in (4, 5, 8, 9)] == [[], [5], [5, 7], [5, 7, 9]]


def test_proven_ids_leave_in_batches(ready: FeedbackKit, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        ready.publish_invalid()
    ready.prove()
    monkeypatch.setattr(feedback, "BATCH_IDS", 3)
    proxy = ManagerProxy(ready.manager)
    ready.with_feedback(proxy)
    assert ready.run().truncated == 7
    assert (proxy.batches, proxy.ids, ready.invalid()) == ([3, 3, 1], ready.aborted, [])


def test_proven_ids_leave_the_list_over_thrift(ready: FeedbackKit, stack: ExitStack) -> None:
    service = TransactionService(ready.manager, "127.0.0.1:0")
    service.start()
    stack.callback(service.stop)
    client = stack.enter_context(TransactionClient(service.address, 60))
    ready.with_feedback(client)
    ready.publish_invalid()
    assert (ready.run().truncated, ready.invalid()) == (2, ready.aborted[2:])


def test_another_participant_keeps_the_list_and_is_reported(ready: FeedbackKit) -> None:
    proxy = ManagerProxy(ready.manager)
    ready.with_feedback(proxy, "messaging", "datasets")
    for _ in range(2):
        report = ready.run()
        [reason] = messages_of(report)
        assert "participants names datasets," in reason
        assert (report.truncated, proxy.calls, report.errors) == (0, 0, [])
    assert ready.invalid() == ready.aborted
    assert ready.janitor.state.runs(1)[0].result == "done"


@pytest.mark.parametrize(
    ("participants", "named"),
    [(("messaging",), ""), (("b", "messaging", "a"), "names a, b,"), (("messagin",), "names messagin,")],
)
def test_withheld_names_any_participant_but_messaging(participants: tuple[str, ...], named: str) -> None:
    reason = reason_to_withhold(participants)
    assert named in reason
    assert bool(reason) is bool(named)


def test_row_that_refutes_the_boundary_keeps_the_list_until_proven_again(ready: FeedbackKit) -> None:
    ready.plant(ready.aborted[1])
    proxy = ManagerProxy(ready.manager)
    ready.with_feedback(proxy)
    report = ready.run()
    [error] = report.errors
    assert error.startswith("the boundary ")
    assert (proxy.ids, report.truncated, report.boundary) == ([], 0, None)
    assert ready.janitor.state.runs(1)[0].result == "partial"
    proven, present = ready.janitor.engine.boundary()
    assert (proven, present.bound, present.obstacles[0]) == (None, None, error)
    status = collect(
        ready.janitor.state, Deployment("memory", "apply", "", ready.janitor.engine.deps.terms), ready.clock
    )
    assert (status.boundary.bound, status.boundary.obstacles[0], status.boundary.refuted) == (None, error, error)
    # The next run is full, because a search for open transactions would not find the row.
    ready.clock.advance(1)
    report = ready.run()
    assert report.full
    assert (report.truncated, report.errors, ready.invalid()) == (2, [], [])
    assert ready.pointers()[-1] == -ready.aborted[1]
    proven, present = ready.janitor.engine.boundary()
    assert proven is not None
    assert present.obstacles == ()
    assert ready.read() == [b"committed"]


def test_row_of_an_id_that_left_refutes_the_boundary_of_later_ones(ready: FeedbackKit) -> None:
    ready.with_feedback()
    assert ready.run().truncated == 2
    ready.plant(ready.aborted[0])
    ready.publish_invalid()
    ready.run()
    ready.clock.advance(DAY)
    report = ready.run()
    assert (report.truncated, len(report.errors), ready.invalid()) == (0, 1, ready.aborted[2:])


def test_feedback_of_plans_and_applied_plans_truncates_nothing(ready: FeedbackKit, tmp_path: Path) -> None:
    proxy = ManagerProxy(ready.manager)
    ready.with_feedback(proxy)
    assert ready.janitor.engine.rehearse().truncated == 0
    ready.janitor.engine.preview(out=tmp_path / "plan.json")
    assert ready.janitor.engine.carry_out(tmp_path / "plan.json").truncated == 0
    assert proxy.calls == 0


def test_feedback_after_a_run_of_some_topics_truncates_nothing(ready: FeedbackKit) -> None:
    ready.with_feedback()
    assert ready.janitor.engine.run_once(patterns=("default:*",)).truncated == 0
    assert ready.invalid() == ready.aborted


def test_feedback_without_a_boundary_truncates_nothing(kit: FeedbackKit) -> None:
    kit.publish_invalid()
    kit.clock.advance(DAY)
    kit.with_feedback(lifetime_known=False)
    report = kit.run()
    assert (report.boundary, report.truncated, kit.invalid()) == (None, 0, kit.aborted)
    [record] = kit.janitor.state.open_ids().values()
    assert record.closed_ms is not None


def test_obstacle_after_the_boundary_keeps_list(ready: FeedbackKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready.store, "obstacles", lambda: ["another janitor is at work"])
    ready.with_feedback()
    report = ready.run()
    assert report.boundary is not None
    assert (report.truncated, ready.invalid()) == (0, ready.aborted)


def test_feedback_with_a_pause_truncates_nothing(ready: FeedbackKit) -> None:
    ready.janitor.state.pause("default:nothing", ready.clock.now_ms())
    ready.with_feedback()
    assert (ready.run().truncated, ready.invalid()) == (0, ready.aborted)


def test_clock_set_back_during_the_audit_keeps_the_list(ready: FeedbackKit) -> None:
    proxy = ManagerProxy(ready.manager, on_call=lambda: ready.clock.step(-3 * DAY))
    ready.with_feedback(proxy)
    report = ready.run()
    assert (proxy.calls, proxy.ids, report.truncated, report.errors) == (1, [], 0, [])


def test_feedback_to_the_manager_of_another_system_sends_nothing(ready: FeedbackKit) -> None:
    other = VisibilityState(0, 0, ready.manager.visibility().write_pointer - 1, array("q", ready.aborted[:1]))
    proxy = ManagerProxy(ready.manager, shown=other)
    ready.with_feedback(proxy)
    report = ready.run()
    assert (proxy.ids, report.truncated, report.errors) == ([], 0, [])
    [reason] = messages_of(report)
    assert "another transaction system?" in reason


def test_empty_list_of_the_manager_is_not_audited(ready: FeedbackKit) -> None:
    proxy = ManagerProxy(ready.manager, shown=VisibilityState(0, 0, ready.manager.visibility().write_pointer))
    ready.with_feedback(proxy)
    before = ready.store.calls["cells"]
    assert (ready.run().truncated, proxy.calls, ready.store.calls["cells"]) == (0, 1, before)


def observer_of_audit(action: Callable[[], object]) -> Callable[..., None]:
    """Return an observer that calls a function after the first page of the audit."""

    def observer(phase: str, *_: object) -> None:
        if phase == "audit":
            action()

    return observer


def test_feedback_paused_during_its_audit_truncates_nothing(ready: FeedbackKit) -> None:
    ready.with_feedback(observer=observer_of_audit(lambda: ready.janitor.state.pause(EVERYTHING, ready.clock.now_ms())))
    report = ready.run()
    assert (report.truncated, report.errors, messages_of(report), ready.invalid()) == (0, [], [], ready.aborted)


def test_feedback_losing_the_lease_during_its_audit_truncates_nothing(ready: FeedbackKit) -> None:
    mine, other = (Lease(ready.janitor.state, holder, 60, ready.clock) for holder in ("this one", "another"))
    mine.acquire()
    ready.with_feedback(lease=mine, observer=observer_of_audit(lambda: other.acquire(sole=True)))
    report = ready.run()
    assert (report.truncated, ready.invalid()) == (0, ready.aborted)
    assert "lease" in {note.guard for note in report.guards}


def test_refutation_after_a_lost_lease_keeps_the_boundary(ready: FeedbackKit) -> None:
    ready.plant(ready.aborted[0])
    mine, other = (Lease(ready.janitor.state, holder, 60, ready.clock) for holder in ("this one", "another"))
    mine.acquire()
    ready.with_feedback(lease=mine, observer=observer_of_audit(lambda: other.acquire(sole=True)))
    ready.run()
    assert ready.janitor.state.boundary() is not None


def test_long_audit_renews_the_lease(ready: FeedbackKit) -> None:
    lease = Lease(ready.janitor.state, "this one", 60, ready.clock)
    lease.acquire()
    before = ready.janitor.state.lease()
    ready.with_feedback(lease=lease, observer=observer_of_audit(lambda: ready.clock.advance(30_000)))
    assert ready.run().truncated == 2
    assert ready.janitor.state.lease() != before


def test_stop_during_the_audit_keeps_list(ready: FeedbackKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "PAGE_ROWS", 1)
    pages: list[int] = []
    ready.with_feedback(observer=observer_of_audit(lambda: pages.append(1)), is_stopping=lambda: bool(pages))
    report = ready.run()
    assert (len(pages), report.truncated, ready.invalid()) == (1, 0, ready.aborted)
    assert "interrupted" in {note.guard for note in report.guards}


def test_stop_between_batches_keeps_rest(ready: FeedbackKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "BATCH_IDS", 1)
    proxy = ManagerProxy(ready.manager)
    ready.with_feedback(proxy, is_stopping=lambda: bool(proxy.ids))
    report = ready.run()
    assert (proxy.ids, report.truncated, ready.invalid()) == (ready.aborted[:1], 1, ready.aborted[1:])
    assert "interrupted" in {note.guard for note in report.guards}
    ready.with_feedback(is_stopping=never)
    assert (ready.run().truncated, ready.invalid()) == (1, [])


@pytest.mark.parametrize(
    ("failing", "error"),
    [
        ("silent", NoSnapshot("no response.")),
        ("error", ServiceUnavailable("no response.")),
        ("error", StoreError("no response.")),
    ],
    ids=["no list", "no service", "no log"],
)
def test_feedback_after_a_manager_failure_is_retried_by_the_next_run(
    ready: FeedbackKit, failing: str, error: Exception
) -> None:
    proxy = ManagerProxy(ready.manager)
    setattr(proxy, failing, error)
    ready.with_feedback(proxy)
    report = ready.run()
    [reason] = messages_of(report)
    assert reason.endswith("no response.")
    assert (report.truncated, report.errors, ready.invalid()) == (0, [], ready.aborted)
    assert ready.janitor.state.runs(1)[0].result == "done"
    assert ready.janitor.state.boundary() is not None
    ready.with_feedback()
    assert (ready.run().truncated, ready.invalid()) == (2, [])


def test_audit_that_fails_keeps_the_list(ready: FeedbackKit, monkeypatch: pytest.MonkeyPatch) -> None:
    ready.with_feedback()
    read = ready.store.message.read

    def fail_for_the_audit(kind: Any, *rest: Any) -> Any:
        if kind is CELLS:
            raise StoreError("the disk is gone.")
        return read(kind, *rest)

    with monkeypatch.context() as broken:
        broken.setattr(ready.store.message, "read", fail_for_the_audit)
        report = ready.run()
    assert messages_of(report) == ["proven transactions could not be removed from the invalid list: the disk is gone."]
    assert (report.errors, ready.invalid()) == ([], ready.aborted)
    assert ready.run().truncated == 2


def test_report_history_and_log_count_ids(ready: FeedbackKit, caplog: pytest.LogCaptureFixture) -> None:
    ready.with_feedback()
    report = ready.run()
    assert report.truncated == 2
    assert ready.janitor.state.report(report.id, Report) == report
    with caplog.at_level(logging.INFO):
        RunLog().write(report)
        RunLog().write(ready.run())
    assert [each.split()[0] for each in caplog.messages if "invalid list" in each] == ["2"]
