"""The transaction manager of a server and its service: exclusive, shared by several servers, or external.

Its metrics show the topics whose readers wait for a transaction. A server records the messages that transactions
publish after its start. It searches for earlier messages in a limited number of rows, so that it starts quickly.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tms_core.clock import CLOCK_ALLOWANCE_MS, Clock
from tms_core.consumers.claim_rows import all_claims, release_void_claims
from tms_core.errors import ConfigurationError, FormatError, StoreError, TmsError, TransactionError
from tms_core.logs.loggers import get_logger
from tms_core.messaging.ids import id_parts, position, tail
from tms_core.messaging.producers.rows import mark_void, started_transactions
from tms_core.rowkey import MESSAGE_TAIL_BYTES, NEGATIVE
from tms_core.security.files import token_reader
from tms_core.security.tls import ServerCertificate
from tms_core.server.ha.manager_log import SideStorage, read_root
from tms_core.server.ha.shared_manager import SharedManager
from tms_core.server.recording import RecordedStorage, check_directory, check_snapshots
from tms_core.settings.models import Settings, TransactionSettings, is_loopback, split_address
from tms_core.tables.base import CELLS, Reads, Store
from tms_core.tables.record import SystemRecord, record_transactions, recorded_transactions
from tms_core.tables.side import SideTable
from tms_core.topic import TopicId, living_topics
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import DirectoryStorage, MemoryStorage, RecoveredLog, Storage
from tms_core.transaction.model import TX_PER_MS, late_transactions, transaction_ms
from tms_core.transaction.rpc.client import TransactionClient, connecting
from tms_core.transaction.rpc.service import CallRouter, Level, TransactionService

if TYPE_CHECKING:
    from tms_core.server.ha.member import HaMember

#: Addresses that mean all interfaces of a machine.
_ALL = ("0.0.0.0", "::", "")  # noqa: S104 - they are compared, not listened at
#: The metric for the alert on waiting readers.
UNDECIDED = "tms_topic_first_undecided_timestamp_seconds"
#: The wait of readers after which a topic gets a series, in seconds; shorter waits would create too many series.
LATE_SECONDS = 30
#: The maximum number of series; the topics with the longest waits have one.
MAX_SERIES = 100
#: The maximum number of searched rows, and the number of rows in a page.
MAX_ROWS, PAGE_ROWS = 200_000, 2_000

logger = get_logger(__name__)


class ServerTransactions(NamedTuple):
    """The transaction manager of a server, and its service.

    Attributes:
        manager: the manager that this server's requests use; None: they trust the client's transactions.
        own: the manager in this process; None: an external system manages transactions.
        global_manager: access to all transactions: the manager in this process, or a client; None: external.
        address: ``HOST:PORT`` of the transaction service in this process; None: no service.
        shared: the manager that several servers share; None: this is the only server.
        service: the transaction service in this process; None: no service.
    """

    manager: TransactionManager | None = None
    own: TransactionManager | None = None
    global_manager: TransactionManager | TransactionClient | None = None
    address: str | None = None
    shared: SharedManager | None = None
    service: TransactionService | None = None


def check_manager(settings: Settings) -> None:
    """Check the settings and the files of a manager before anything is created.

    Raises:
        ConfigurationError: the manager or its service could not start.
    """
    transactions = settings.transactions
    if transactions.source != "manager":
        return
    is_alone = settings.server.leader.advertise is None
    if "://" in transactions.directory and settings.storage.kind != "memory" and is_alone:
        raise ConfigurationError(
            f"transactions.directory is {transactions.directory}, but a transaction manager needs a folder on this "
            "machine.",
            "Set transactions.directory to a folder, or set transactions.source: directory.",
        )
    if (
        transactions.token_file is None
        and not is_loopback(split_address(transactions.thrift)[0])
        and not transactions.allow_without_token
    ):
        raise ConfigurationError(
            f"transactions.thrift is {transactions.thrift}, where any client without a token could commit or abort "
            "transactions and make invalid ones visible.",
            "Set transactions.token_file, or set transactions.thrift to 127.0.0.1:15165. For Tephra clients on other "
            "machines, set transactions.allow_without_token: true.",
        )
    _tokens(transactions)
    _certificate(transactions)


def open_manager(
    settings: Settings,
    clock: Clock,
    store: Store,
    side: SideTable,
    member: HaMember | None,
    stack: ExitStack,
    *,
    created: bool = False,
) -> ServerTransactions:
    """Open the configured transaction manager.

    Args:
        store: the store; only read.
        created: whether this process has created the store.
        member: this server as a member of a group; None: the store admits only one server.
        stack: closes the opened objects.

    Raises:
        ConfigurationError: the manager's folder or the service's port cannot be used.
        TmsError: the manager cannot start.
    """
    transactions = settings.transactions
    if transactions.source == "directory":
        check_snapshots(transactions.directory, side)
    if transactions.source != "manager":
        return ServerTransactions()
    if member is not None and not member.is_alone:
        return _among_several(settings, clock, store, side, member, stack)
    if member is not None:
        check_alone(settings, side)
    storage = _storage(settings, store, side, created=created)
    manager = stack.enter_context(
        TransactionManager(storage, clock, offset=offset, release=partial(release_rows, side))
    )
    # Before the service starts, because a client could then abort one of these transactions.
    find_undecided(store, side, manager)
    service = _service(manager, transactions, stack)
    return ServerTransactions(manager, manager, manager, service.address, service=service)


def offset() -> int:
    """Return a random offset of a transaction id in its millisecond, so that clients cannot guess ids."""
    return secrets.randbelow(TX_PER_MS)


def release_rows(side: SideTable, is_leaving: Callable[[int], bool]) -> None:
    """Release the claims, and mark the producers' transactions as void, of ids that will leave the invalid list.

    Afterwards, claims of these ids would count as processed, and producers would treat the transactions as committed.

    Args:
        is_leaving: selects the ids.

    Raises:
        StoreError: the table could not be read or written, or a row is damaged.
    """
    try:
        freed = release_void_claims(side, is_leaving, lambda _: False)
        marked = mark_void(side, is_leaving)
    except FormatError as error:
        # The service would report a FormatError as a fault of the client's call, and not log it.
        raise StoreError(error.message, error.hint) from error
    if freed or marked:
        text = "released %d claims of groups and %d transactions of producers before their ids leave the invalid list"
        logger.info(text, freed, marked)


def check_alone(settings: Settings, side: SideTable) -> None:
    """Check that the transaction log of an exclusive server is not in HBase; call it again after the lease is acquired.

    Raises:
        ConfigurationError: several servers have managed the transactions of this store.
    """
    if settings.transactions.source == "manager" and read_root(side) is not None:
        raise ConfigurationError(
            "The transaction log of this store is in HBase, because several servers have managed its transactions, and "
            "this server would use transactions.directory.",
            "Set server.leader.advertise, also for a single server.",
        )


def register_metrics(
    transactions: ServerTransactions, side: SideTable, clock: Clock, registry: CollectorRegistry
) -> None:
    """Register the manager's metrics."""
    if transactions.own is not None:
        registry.register(TransactionMetrics(transactions.own, side, clock))


def _among_several(
    settings: Settings, clock: Clock, store: Store, side: SideTable, member: HaMember, stack: ExitStack
) -> ServerTransactions:
    transactions, server = settings.transactions, settings.server
    one_leader, leadership = server.leader.slots == 1, member.slots.leaderships[0]

    def record_takeover(manager: TransactionManager) -> None:
        root = read_root(side)
        if root is not None:
            place = f"the side table of HBase namespace {settings.storage.hbase.namespace}"
            record_transactions(side, SystemRecord(root.log, place, manager.last_pointer, root.taken_ms))
        # With several slots, the manager does not know all published messages, because other servers publish too.
        if one_leader:
            find_undecided(store, side, manager)

    if read_root(side) is None:
        # Check again when the log starts, which may be hours later.
        _check_no_undecided(transactions.directory, store, side)
    storage = SideStorage(side, leadership.lease_check, partial(_stored_log, transactions.directory, store, side))
    manager = TransactionManager(storage, clock, offset=offset, release=partial(release_rows, side))
    connect = connecting(transactions, server.leader.certificate_name)
    shared = stack.enter_context(
        SharedManager(manager, storage, leadership, side, clock, connect=connect, on_takeover=record_takeover)
    )
    service = _service(shared.manager, transactions, stack, shared)
    reached = _advertised_address(server.leader.advertise or "", service)
    shared.set_address(reached)
    # This server's own address may be 0.0.0.0, which no certificate names.
    connect = connecting(transactions, server.leader.certificate_name or split_address(reached)[0])
    client = stack.enter_context(TransactionClient(service.address, connect=connect))
    return ServerTransactions(
        shared.manager if one_leader else None, shared.manager, client, service.address, shared, service
    )


def _service(
    manager: TransactionManager,
    settings: TransactionSettings,
    stack: ExitStack,
    router: CallRouter | None = None,
) -> TransactionService:
    service = TransactionService(
        manager,
        settings.thrift,
        snapshot_seconds=settings.snapshot_interval_seconds,
        tokens=_tokens(settings),
        router=router,
        certificate=_certificate(settings),
    )
    service.start()
    stack.callback(service.stop)
    return service


def _tokens(settings: TransactionSettings) -> dict[Level, Callable[[], bytes]]:
    files = {
        Level.CLIENT: ("transactions.token_file", settings.token_file),
        Level.ADMIN: ("transactions.admin_token_file", settings.admin_token_file),
    }
    return {level: token_reader(setting, file) for level, (setting, file) in files.items() if file is not None}


def _certificate(settings: TransactionSettings) -> ServerCertificate | None:
    tls = settings.tls
    return None if tls is None else ServerCertificate("transactions.tls.", tls.certificate, tls.key)


def _storage(settings: Settings, store: Store, side: SideTable, *, created: bool) -> Storage:
    directory = settings.transactions.directory
    if settings.storage.kind == "memory":
        return MemoryStorage()
    check_directory(directory, side, created=created)
    is_new = recorded_transactions(side) is None and not DirectoryStorage.has_log(Path(directory))
    # Only a warning, because a store that CDAP wrote looks like a store whose log is missing.
    if is_new and not created and may_have_undecided(store):
        logger.warning(
            "the store has messages of transactions, and %s has no transaction log: messages of transactions that were "
            "open or invalid become visible. If another folder has the log, stop this server, and set "
            "transactions.directory",
            directory,
        )
    storage = DirectoryStorage(Path(directory))
    try:
        return RecordedStorage(storage, side, Path(directory))
    except TmsError:
        storage.close()
        raise


def _stored_log(directory: str, store: Store, side: SideTable) -> RecoveredLog:
    """Return the state that an exclusive manager has stored in a folder; empty if the folder does not exist."""
    _check_no_undecided(directory, store, side)
    if not _is_folder(directory):
        return MemoryStorage().recover()
    storage = DirectoryStorage(Path(directory))
    try:
        found = storage.recover()
        return RecoveredLog(found.snapshot, iter(list(found.edits)), found.newest_ms)
    finally:
        storage.close()


def _check_no_undecided(directory: str, store: Store, side: SideTable) -> None:
    """Check that a manager with a new log knows the invalid transactions; otherwise readers would see their messages.

    Raises:
        ConfigurationError: the folder with the old log does not exist, and the store may have such messages.
    """
    if "://" not in directory:
        check_directory(directory, side)
    if not _is_folder(directory) and may_have_undecided(store):
        raise ConfigurationError(
            f"The store may have messages of aborted transactions, and transactions.directory ({directory}), which has "
            "the log of the previous transaction manager, is not a folder on this machine.",
            "Start a server with server.leader.advertise on the machine with that folder. If this store has never had "
            f"transactions, create the folder: mkdir -p {directory}",
        )


def _is_folder(directory: str) -> bool:
    return "://" not in directory and Path(directory).is_dir()


def _advertised_address(advertise: str, service: TransactionService) -> str:
    """Return the address of a service for other servers; a local host is replaced by this server's advertised host."""
    host, port = split_address(service.address)
    if host in _ALL or is_loopback(host):
        host = urlsplit(advertise).hostname or host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class TransactionMetrics(Collector):
    """Metrics of the transaction manager in this process, read at each scrape."""

    def __init__(self, manager: TransactionManager, side: SideTable, clock: Clock) -> None:
        self._manager = manager
        self._side = side
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        manager = self._manager
        undecided = GaugeMetricFamily(
            UNDECIDED,
            "Time of the first message of a topic at which readers in transactions wait for a late transaction.",
            labels=["tms_namespace", "topic"],
        )
        claims = GaugeMetricFamily("tms_open_claims", "Claims of consumer groups with transactions in progress.")
        oldest = GaugeMetricFamily(
            "tms_oldest_open_claim_timestamp_seconds", "Start of the oldest transaction with an open claim."
        )
        if manager.is_running:
            # A former leader yields families without samples. A damaged row must not hide the metrics of all others.
            with suppress(TransactionError, StoreError, FormatError):
                self._add_samples(undecided, claims, oldest)
        yield from (undecided, claims, oldest)

    def _add_samples(self, undecided: GaugeMetricFamily, claims: GaugeMetricFamily, oldest: GaugeMetricFamily) -> None:
        manager = self._manager
        before_ms = self._clock.now_ms() - LATE_SECONDS * 1000
        first: dict[str, int] = {}
        # No label has a transaction id, because a client that knows an id can write with it.
        for late in late_transactions(manager.published(), {}, before_ms):
            for topic, publish_ms in late.topics:
                first[topic] = min(publish_ms, first.get(topic, publish_ms))
        for publish_ms, topic in sorted((publish_ms, topic) for topic, publish_ms in first.items())[:MAX_SERIES]:
            name = TopicId.parse(topic)
            undecided.add_metric([name.namespace, name.topic], publish_ms / 1000)
        in_progress = manager.visibility().open_pointers
        opened = [claim.pointer for _, _, claim in all_claims(self._side) if claim.pointer in in_progress]
        claims.add_metric([], len(opened))
        if opened:
            oldest.add_metric([], transaction_ms(min(opened)) / 1000)


def find_undecided(store: Reads, side: SideTable, manager: TransactionManager) -> None:
    """Record the messages, claims and producers of transactions in progress from before the start of this manager.

    Args:
        store, side: the tables; only read.

    Raises:
        StoreError: the store could not be read.
        FormatError: a row of the side table is damaged.
    """
    open_pointers, remaining = manager.visibility().open_pointers, MAX_ROWS
    if not open_pointers:
        return
    claims = ((claim.pointer, group.label) for _, group, claim in all_claims(side))
    transactions = (
        (started.pointer, producer.label) for producer, started in started_transactions(side) if not started.void
    )
    for pointer, place in chain(claims, transactions):
        if pointer in open_pointers:
            manager.note_written(pointer, place)
    first = tail(position(max(0, transaction_ms(min(open_pointers)) - CLOCK_ALLOWANCE_MS)))
    for topic in living_topics(store.metadata.rows()):
        prefix = topic.rows_prefix
        start: bytes | None = prefix + first
        while start is not None and remaining > 0:
            page = store.message.read(CELLS, start, prefix + NEGATIVE, PAGE_ROWS)
            remaining, start = remaining - PAGE_ROWS, page.resume
            for cell in page.items:
                if cell.pointer in open_pointers and len(cell.key) == len(prefix) + MESSAGE_TAIL_BYTES:
                    publish_ms, _ = id_parts(int.from_bytes(cell.key[len(prefix) :], "big"))
                    manager.note_published(cell.pointer, str(topic.topic), publish_ms)
                    manager.note_written(cell.pointer, str(topic.topic))
        if start is not None:
            # The search is incomplete: an abort could make messages visible that it has not found.
            manager.note_unknown()
            return


def may_have_undecided(store: Reads) -> bool:
    """Return whether the store may have messages whose visibility depends on a transaction manager's state.

    Args:
        store: the store; only read.

    Returns:
        False if no row has a positive write pointer; True also if the store has more rows than the search reads.

    Raises:
        StoreError: the store could not be read.
    """
    start: bytes | None = b""
    remaining = MAX_ROWS
    while start is not None and remaining > 0:
        page = store.message.read(CELLS, start, None, PAGE_ROWS)
        if any(cell.pointer > 0 for cell in page.items):
            return True
        remaining, start = remaining - PAGE_ROWS, page.resume
    return start is not None
