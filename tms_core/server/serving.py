"""A complete server: its parts are opened in order, and closed in the reverse order.

The order is: store, transactions, messaging, companions, HTTP. Therefore no part serves requests before its
dependencies are open. A stop rejects new requests, finishes running requests, writes accepted messages, stops
companions and the manager, and closes the store.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry

from tms_core.clock import Clock, SystemClock
from tms_core.errors import ConfigurationError, StoreError, TopicExists, hint_for_extra
from tms_core.messaging.publish.workers import EventLoopWorkers
from tms_core.messaging.service import MessagingService, ServiceOptions
from tms_core.security.tls import ServerCertificate
from tms_core.server import companions
from tms_core.server.auth.gate import Authenticator, Gate, Rules
from tms_core.server.auth.tokens import Tokens
from tms_core.server.managing import ServerTransactions, check_alone, check_manager, open_manager, register_metrics
from tms_core.server.memory import LentMemory, Memory
from tms_core.server.metrics import LeadershipMetrics, ServerMetrics
from tms_core.server.recording import lost_side
from tms_core.server.rest.app import make_app
from tms_core.server.rest.context import PollLimit, ServerContext, ThreadShares, WaitingPolls
from tms_core.server.rest.known_publish import KNOWN_HEADS
from tms_core.settings.models import (
    ASSUMED_LIFETIME_SECONDS,
    AuthSettings,
    Settings,
    StorageSettings,
    TlsSettings,
    expand_topics,
    is_loopback,
    load,
    split_address,
)
from tms_core.tables.base import Store
from tms_core.tables.leveldb.layout import FOLDERS, holds_database, written_ms
from tms_core.tables.leveldb.side import LevelDBSide, side_path
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore
from tms_core.tables.recently_set import RecentlySet
from tms_core.tables.side import MemorySide, SideTable
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import system_of
from tms_core.transaction.rpc.service import listen as listen_for_calls
from tms_core.web.listener import Listener, ListenerOptions
from tms_core.web.protocol import connection_limit
from tms_core.web.thread import listen

if TYPE_CHECKING:
    from tms_core.server.rest.forward import Forwarder

#: The number of threads for polls. Polls of a local store use the processor, and delay the event loop; polls of HBase
#: mostly wait for responses.
_POLL_THREADS = {"hbase": 16, "leveldb": 4, "memory": 4}
#: The number of threads for other blocking calls: topics, consumers, rollbacks, large bodies.
_THREADS = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunningServer:
    """A running server.

    Attributes:
        url: the URL of the REST API, without a trailing slash.
        transactions: ``HOST:PORT`` of the transaction service in this process; None: no service.
        companions: the companions by name.
    """

    url: str
    transactions: str | None
    companions: Mapping[str, companions.Companion]


@contextmanager
def serving(
    config: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, object],
    *,
    janitor: bool = True,
    clock: Clock | None = None,
) -> Iterator[RunningServer]:
    """Run a server while the block runs.

    Args:
        config: the settings file; None: the built-in configuration.
        environ: ``os.environ``.
        flags: ``leveldb``, ``hbase``, ``snapshots``; None: the flag is missing.
        janitor: whether to start the installed companions.

    Raises:
        ConfigurationError: a setting is wrong, or a port is not available.
        StoreBusy: another process has the store open.
        TmsError: a part could not be opened.
    """
    settings = load(config, environ, flags).settings
    clock = clock or SystemClock()
    # Before the store is opened, because a setting, a file or a port may be invalid.
    gate = make_gate(settings.server.auth, clock, connection_limit(settings.server.max_connections))
    _check_certificate(settings.server.tls)
    check_manager(settings)
    starts = companions.load_all() if janitor else {}
    for sentence in exposure_warnings(settings):
        logger.warning("%s", sentence)
    with ExitStack() as stack:
        if _is_new(settings.storage):
            # Listen on all ports at the same time, because two settings may have the same port.
            with ExitStack() as ports:
                _listen_on_ports(settings, ports)
                companions.check(starts, config, environ, flags)
        opened = _open(settings, clock)
        store = stack.enter_context(opened.store)
        side = _side(settings, clock, stack, opened)
        member = None
        if settings.storage.kind == "hbase":
            from tms_core.server.ha.member import on_hbase  # noqa: PLC0415 as in _open

            among = on_hbase(settings.storage.hbase, settings.server.leader, store, side, clock)
            member = stack.enter_context(among)
        transactions = open_manager(settings, clock, store, side, member, stack, created=opened.created)
        manager = transactions.manager
        workers = EventLoopWorkers()
        service = _messaging(
            settings,
            member.store if member else store,
            clock,
            manager,
            stack,
            side=side,
            fenced_side=member.side if member else None,
            workers=workers,
        )
        service.note_past(opened.past_ms)
        registry = CollectorRegistry()
        if member is not None:
            registry.register(LeadershipMetrics(member.slots))
            if member.is_alone:
                member.start(service)
                # Another server may have led during the wait.
                check_alone(settings, side)
        _create_topics(settings.server.system_topics, service)
        register_metrics(transactions, side, clock, registry)
        started: dict[str, companions.Companion] = {}
        if starts:
            companion_context = companions.CompanionContext(
                config, environ, flags, store, opened.created, service, transactions.global_manager, registry, clock
            )
            for name, function in starts.items():
                start = partial(function, companion_context)
                started[name] = companion = start() if member is None else companions.start_companion(name, start)
                stack.callback(companion.stop)
        waiting = WaitingPolls(connection_limit(settings.server.max_connections))
        forwarder = member.forwarder if member else None
        listener = _listen(settings, service, gate, registry, forwarder, waiting, transactions, started, stack)
        if member is None:
            workers.alone = partial(listener.alone, waiting=waiting.polls)
        elif not member.is_alone:
            member.start(service, listener.port, transactions.shared)
        yield RunningServer(listener.url, transactions.address, started)


class _OpenResources(NamedTuple):
    store: Store
    created: bool
    #: The time of the last write before the start; 0: unknown.
    past_ms: int = 0


def _open(settings: Settings, clock: Clock) -> _OpenResources:
    storage = settings.storage
    if storage.kind == "memory":
        return _OpenResources(MemoryStore(), created=True)
    if storage.kind == "leveldb":
        path = storage.leveldb.path
        created = _is_new(storage)
        # Before the store is opened, because that writes to it.
        past_ms = written_ms(path)
        return _OpenResources(LevelDBStore(path, create=True), created, past_ms)
    from tms_core.tables.hbase.store import HBaseStore  # noqa: PLC0415 Thrift takes a sixth of a start without it

    store = HBaseStore(storage.hbase, clock)
    try:
        # Check at the start; otherwise the first publish would fail.
        store.check_buckets()
    except StoreError:
        store.close()
        raise
    return _OpenResources(store, created=False)


def _is_new(storage: StorageSettings) -> bool:
    """Return whether the store will be created."""
    return storage.kind == "leveldb" and not holds_database(storage.leveldb.path / FOLDERS["metadata"])


def _check_certificate(tls: TlsSettings | None) -> None:
    if tls is not None:
        ServerCertificate("server.tls.", tls.certificate, tls.key)


def _listen_on_ports(settings: Settings, ports: ExitStack) -> None:
    """Check the ports before a store is created: after an error there, an empty store would stay.

    An existing store is opened first, because the server that has the ports is likely to have the store, too.
    """
    server, transactions = settings.server, settings.transactions
    ports.enter_context(listen(server.host, server.port, setting="server", other="another tms serve"))
    if transactions.source == "manager":
        ports.enter_context(listen_for_calls(transactions.thrift))


def _messaging(
    settings: Settings,
    store: Store,
    clock: Clock,
    manager: TransactionManager | None,
    stack: ExitStack,
    **more: Any,
) -> MessagingService:
    """Return the messaging service; ``more`` is passed to its constructor."""
    server, transactions = settings.server, settings.transactions
    service = MessagingService(
        store,
        clock,
        ServiceOptions(
            default_ttl_seconds=server.default_ttl_seconds,
            max_lifetime_seconds=transactions.max_lifetime_seconds or ASSUMED_LIFETIME_SECONDS,
            grace_seconds=transactions.grace_seconds,
            cache_bytes=server.cache_mb << 20,
            consumer_hold_seconds=server.consumers.hold_seconds,
            retry_seconds=server.consumers.retry_seconds,
            longest_retry_seconds=server.consumers.longest_retry_seconds,
        ),
        transactions=manager,
        **more,
    )
    stack.callback(service.close)
    return service


def _create_topics(names: Sequence[str], service: MessagingService) -> None:
    for topic in chain.from_iterable(map(expand_topics, names)):
        with suppress(TopicExists):
            service.create_topic(topic, {})


def _side(settings: Settings, clock: Clock, stack: ExitStack, opened: _OpenResources) -> SideTable:
    """Return the side table; for LevelDB it is a separate database next to the store."""
    storage = settings.storage
    if storage.kind == "leveldb":
        folder, log = side_path(storage.leveldb.path), Path(settings.transactions.directory)
        if (opened.created or not holds_database(folder)) and system_of(log):
            if not opened.created:
                # Before the folder is created, because a backup can only be restored to a missing folder.
                raise lost_side(str(folder), str(log))
            logger.warning(
                "%s has a new store, and the transaction log in %s was used with a store before: if that store is "
                "missing, stop this server, and mount or restore its folder",
                storage.leveldb.path,
                log,
            )
    return stack.enter_context(open_side(storage, clock))


def open_side(storage: StorageSettings, clock: Clock) -> SideTable:
    """Open the side table of a store; create it if it does not exist.

    Raises:
        StoreError: the table could not be opened or created.
    """
    if storage.kind == "memory":
        return MemorySide()
    if storage.kind == "leveldb":
        return LevelDBSide(side_path(storage.leveldb.path))
    from tms_core.tables.hbase.pool import HBasePool  # noqa: PLC0415 as in _open
    from tms_core.tables.hbase.side import HBaseSide  # noqa: PLC0415 as in _open

    hbase = storage.hbase
    return HBaseSide(HBasePool.configured(hbase, clock=clock), hbase.namespace, clock=clock)


def _listen(
    settings: Settings,
    service: MessagingService,
    gate: Gate | None,
    registry: CollectorRegistry,
    forwarder: Forwarder | None,
    waiting: WaitingPolls,
    transactions: ServerTransactions,
    started: Mapping[str, companions.Companion],
    stack: ExitStack,
) -> Listener:
    server, manager = settings.server, transactions.manager
    poll_thread_count = _POLL_THREADS[settings.storage.kind]
    poll_threads = ThreadPoolExecutor(poll_thread_count, thread_name_prefix="poll")
    metrics = ServerMetrics(registry, service)
    context = ServerContext(
        service,
        stack.enter_context(ThreadPoolExecutor(_THREADS, thread_name_prefix="call")),
        metrics,
        server.max_request_mb << 20,
        gate,
        poll_threads=stack.enter_context(poll_threads),
        memory=Memory(server.memory << 20),
        poll_limit=PollLimit(server.poll_limit.messages, server.poll_limit.bytes),
        waiting=waiting,
        thread_shares=ThreadShares(_THREADS),
        poll_thread_shares=ThreadShares(poll_thread_count),
        group_poll_shares=ThreadShares(poll_thread_count),
        transaction_ids=server.max_transaction_ids,
        present_ids=(lambda: 0) if manager is None else (lambda: manager.listed_ids),
        hold_seconds=lambda: next((one.hold_seconds for one in started.values() if one.hold_seconds is not None), None),
    )
    app = make_app(context, loopback=is_loopback(server.host), access_log=server.access_log, forwarder=forwarder)
    listener = Listener(
        app,
        server.host,
        server.port,
        server.tls,
        ListenerOptions(max_connections=server.max_connections, lifespan=forwarder is not None),
        on_stop=waiting.close,
        heads=None if server.access_log or forwarder is not None else RecentlySet(KNOWN_HEADS),
        # A server does not know the principals of the requests that it forwards.
        identify=None if gate is None or forwarder is not None else gate.identify,
    )
    listener.start()
    stack.callback(listener.stop)
    if transactions.service is not None and listener.loop is not None:
        transactions.service.room = LentMemory(context.memory, listener.loop).take
    return listener


def exposure_warnings(settings: Settings) -> Iterator[str]:
    """Yield a warning for each unprotected interface, and for rules that reject all requests.

    Unprotected interfaces are not errors, because a TLS proxy or a network policy may protect them.
    """
    server, transactions = settings.server, settings.transactions
    if server.auth.kind != "none":
        if not is_loopback(server.host) and server.tls is None:
            yield (
                f"server.host is {server.host} and server.tls is null: tokens can be read on the network. "
                "Set server.tls, or let only the proxy that terminates TLS reach this port"
            )
        if not server.auth.rules:
            yield "server.auth.rules is empty: no principal has permissions. Add at least one rule"
    host, _ = split_address(transactions.thrift)
    is_open = transactions.token_file is None and transactions.allow_without_token
    if transactions.source == "manager" and not is_loopback(host) and is_open:
        yield (
            f"transactions.thrift is {transactions.thrift}, and transactions.allow_without_token lets any client end "
            "transactions. Let only trusted machines reach this port, and set transactions.admin_token_file"
        )


def make_gate(settings: AuthSettings, clock: Clock, connections: int = 500) -> Gate | None:
    """Return the access control of a server; None: no restrictions, which settings allow only on loopback.

    Args:
        settings: ``server.auth``.
        connections: the maximum number of connections of the server.

    Raises:
        ConfigurationError: the tokens or keys cannot be used, or PyJWT is not installed.
    """
    authenticator: Authenticator
    if settings.kind == "none":
        return None
    if settings.kind == "tokens":
        authenticator = Tokens(_require_file(settings.tokens_file), clock)
    else:
        authenticator = _jwt(settings, _require_file(settings.key_file), clock)
    return Gate(authenticator, Rules(settings.rules), clock, settings.quotas, connections)


def _require_file(path: Path | None) -> Path:
    if path is None:
        raise ConfigurationError(
            "server.auth has no file of tokens or keys.", "Set server.auth.tokens_file or server.auth.key_file."
        )
    return path


def _jwt(settings: AuthSettings, path: Path, clock: Clock) -> Authenticator:
    try:
        from tms_core.server.auth.jwt import Jwt  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            "server.auth.kind is jwt, and PyJWT is not installed.", hint_for_extra("jwt")
        ) from error
    return Jwt(settings, path, clock)
