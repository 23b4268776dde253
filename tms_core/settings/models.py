"""The settings of store, transactions and server, each with description, unit, default and the reason for the default.

``janitor.settings`` declares the section ``janitor``, which this package ignores, because it works without the janitor.
``docs/reference/configuration.md`` is generated from the models.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, Strict, model_validator

from tms_core.settings.fields import Section, invalid, setting
from tms_core.settings.layers import Flags, LoadedSettings, load_as
from tms_core.topic import INT_MAX, TopicId

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
#: The characters of a shell pattern over ``namespace:topic``.
_PATTERN = re.compile(r"[A-Za-z0-9_:*?\[\]!-]+")
#: The characters of a rule's pattern: a pattern of namespaces and a pattern of topics.
_RULE_PATTERN = re.compile(r"[A-Za-z0-9_*?\[\]!-]+:[A-Za-z0-9_*?\[\]!-]+")
_MAX_PORT = 65535
#: The memory for the largest request, and for a poll of its messages, as a multiple of its size.
_MEMORY_OF_REQUEST = 6
#: The largest number of topics in a numbered entry; CDAP's entries have ten.
_MAX_NUMBERED_TOPICS = 1000


def _address(address: str) -> str:
    _, port = split_address(address)
    if not port:
        raise ValueError("this is not HOST:PORT")
    return address


def _address_or_any_port(address: str) -> str:
    split_address(address)
    return address


#: The assumed lifetime of transactions without ``transactions.max_lifetime_seconds``: Tephra's default
#: (data.tx.max.lifetime).
ASSUMED_LIFETIME_SECONDS = 90_000


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, without the brackets of an IPv6 address.

    Raises:
        ValueError: the text is not an address.
    """
    match = _ADDRESS.fullmatch(address)
    if not match or int(match[2]) > _MAX_PORT:
        raise ValueError("this is not HOST:PORT")
    return match[1].strip("[]"), int(match[2])


def _url(url: str) -> str:
    scheme, _, address = url.partition("://")
    if scheme not in ("http", "https"):
        raise ValueError("this is not http://HOST:PORT or https://HOST:PORT")
    split_address(address)
    return url


def _system_topic(entry: str) -> str:
    expand_topics(entry)
    return entry


def expand_topics(entry: str) -> list[TopicId]:
    """Return the topics of an entry of ``server.system_topics``: ``[NAMESPACE:]TOPIC[:N]``.

    The default namespace is ``system``, as for CDAP's topics. With a number, the topics are ``TOPIC0`` to
    ``TOPIC(N-1)``, as in ``messaging.system.topics`` (``MessagingServiceUtils``). Therefore a numeric last part is
    never a topic's name.

    Raises:
        ValueError: the entry is invalid.
    """
    *names, last = entry.split(":")
    count = int(last) if names and last.isdecimal() else None
    if count is None:
        names.append(last)
    elif not 1 <= count <= _MAX_NUMBERED_TOPICS:
        raise ValueError(f"the number must be 1 to {_MAX_NUMBERED_TOPICS}; a topic is written NAMESPACE:TOPIC")
    topic = TopicId.parse(":".join(names if len(names) > 1 else ["system", *names]))
    return [topic] if count is None else [TopicId.parse(f"{topic}{number}") for number in range(count)]


def _pattern(pattern: str) -> str:
    if not _PATTERN.fullmatch(pattern) or not set(":*") & set(pattern):
        raise ValueError("this matches no topic; a topic is written NAMESPACE:TOPIC, a pattern default:audit*")
    return pattern


def _rule_pattern(pattern: str) -> str:
    # A single pattern for both parts would let ``prod*`` match ``prod_secret:x``.
    if not _RULE_PATTERN.fullmatch(pattern):
        raise ValueError(
            "a rule's topics are written NAMESPACE:TOPIC, with a pattern on each side: default:audit*, *:*"
        )
    return pattern


def is_loopback(host: str) -> bool:
    """Return whether only programs on this machine can connect to a host: ``localhost``, 127.0.0.0/8, ::1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


Switch = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=1, le=INT_MAX)]
CountOrZero = Annotated[int, Strict(), Field(ge=0, le=INT_MAX)]
Port = Annotated[int, Strict(), Field(ge=0, le=_MAX_PORT)]
HostName = Annotated[str, Field(min_length=1)]
Address = Annotated[str, AfterValidator(_address)]
ListenAddress = Annotated[str, AfterValidator(_address_or_any_port)]
Url = Annotated[str, AfterValidator(_url)]
SystemTopic = Annotated[str, AfterValidator(_system_topic)]
TopicPattern = Annotated[str, AfterValidator(_pattern)]
NamePattern = Annotated[str, Field(pattern=r"^[A-Za-z0-9_*?\[\]!-]+$")]
RulePattern = Annotated[str, AfterValidator(_rule_pattern)]
#: Signature algorithms of JWTs. All of them are asymmetric, so the server has no key that could sign a token.
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


class TlsSettings(Section):
    certificate: Path = setting(
        ...,
        "certificate chain, a PEM file; the program reads a changed file again",
        reason="there is no safe default",
        place=True,
    )
    key: Path = setting(
        ...,
        "private key of the certificate, a PEM file that other users cannot read",
        reason="there is no safe default",
        place=True,
    )


class ClientTlsSettings(Section):
    ca_file: Path | None = setting(
        None,
        "file with certificates (PEM) of the authorities that sign the servers' certificates; the program reads a"
        " changed file again; null: the system's authorities",
        reason="servers may have certificates of a public authority",
        place=True,
    )
    server_name: Annotated[str, Field(min_length=1)] | None = setting(
        None,
        "name in the servers' certificates; null: the host of each address",
        reason="certificates name hosts",
    )
    certificate: Path | None = setting(
        None,
        "the client's certificate chain, a PEM file; the program reads a changed file again; null: the client "
        "presents none",
        reason="few servers require one",
        place=True,
    )
    key: Path | None = setting(
        None,
        "private key of the certificate, a PEM file that other users cannot read",
        reason="as for certificate",
        place=True,
    )

    @model_validator(mode="after")
    def _check_key_pair(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            missing = "certificate" if self.certificate is None else "key"
            raise invalid(missing, "certificate and key belong together; set both or neither")
        return self


class KerberosSettings(Section):
    principal: Annotated[str, Field(min_length=1)] | None = setting(
        None,
        "principal that logs in, such as janitor@EXAMPLE.COM; null: the principal of the ticket cache, or the "
        "first principal of the keytab",
        reason="a keytab usually has one principal",
    )
    keytab: Path | None = setting(
        None,
        "file with the principal's key, which other users cannot read; the program fetches and renews tickets "
        "with it; null: another program keeps a ticket in the cache",
        reason="there is no safe default",
        place=True,
    )
    ticket_cache: Annotated[str, Field(min_length=1)] | None = setting(
        None,
        "ticket cache if there is no keytab, such as FILE:/run/janitor/tickets; null: KRB5CCNAME, or the system's"
        " cache",
        reason="where kinit puts tickets",
    )


class HBaseKerberosSettings(KerberosSettings):
    service: Annotated[str, Field(pattern=r"^[^/@\s]+/[^/@\s]+(@[^/@\s]+)?$")] | None = setting(
        None,
        "principal of the Thrift servers: HBase's hbase.thrift.kerberos.principal, over HTTP "
        "hbase.thrift.spnego.principal; _HOST is the host of each address; without @REALM, the realm of krb5.conf; "
        "null: hbase/_HOST, over HTTP HTTP/_HOST",
        reason="HBase's convention",
    )


class LevelDbSettings(Section):
    path: Path = setting(
        Path("data/messaging"),
        "folder with system.tms.meta, system.tms.message and system.tms.payload, and nothing else",
        reason="next to the other data of a checkout",
        place=True,
    )


#: HBase's default of hbase.client.keyvalue.maxsize.
MAX_CELL_BYTES = 10 << 20


class HBaseSettings(Section):
    thrift: Annotated[tuple[Address, ...], Field(min_length=1)] = setting(
        ("127.0.0.1:9090",), "HOST:PORT of each HBase Thrift server", reason="HBase's own default port"
    )
    thrift2: Annotated[tuple[Address, ...], Field(min_length=1)] | None = setting(
        None,
        "HOST:PORT of each HBase Thrift 2 server; null: do not read the descriptors of the tables",
        reason="sweeps need Thrift 1 only",
    )
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")] = setting(
        "cdap_system", "HBase namespace of the tables", reason="where CDAP puts its system tables"
    )
    transport: Literal["tcp", "http"] = setting(
        "tcp",
        "transport of the Thrift connections; http: for servers with hbase.regionserver.thrift.http",
        reason="HBase's default",
    )
    tls: ClientTlsSettings | None = setting(
        None,
        "TLS of the Thrift connections (hbase.thrift.ssl.enabled); null: none; {}: the system's authorities, "
        "and no client certificate",
        reason="HBase's default is none, and its servers speak TLS over HTTP only",
    )
    kerberos: HBaseKerberosSettings | None = setting(
        None,
        "Kerberos login at Thrift servers that demand it, by SASL (hbase.thrift.security.qop), over HTTP by SPNEGO; "
        "null: none; {}: with the ticket that kinit made",
        reason="HBase's default is none",
    )
    connections: Count = setting(
        4, "Thrift connections kept open", unit="connections", reason="as many as the janitor has workers"
    )
    timeout_seconds: Count = setting(
        30,
        "time limit of a call; the program closes a connection whose call exceeds it",
        unit="seconds",
        reason="long enough for a page while a region moves; no call may hang",
    )
    buckets: Annotated[int, Strict(), Field(ge=1, le=256)] = setting(
        16,
        "salt buckets of created tables and of written rows; refused if the tables have another number",
        unit="buckets",
        reason="CDAP's default",
    )
    max_cell_bytes: Annotated[int, Strict(), Field(ge=1 << 16, le=INT_MAX)] = setting(
        MAX_CELL_BYTES,
        "largest cell that HBase accepts, its hbase.client.keyvalue.maxsize and hbase.server.keyvalue.maxsize; "
        "the server responds 413 to a message above this minus 1 KiB for its key",
        unit="bytes",
        reason="HBase's default",
    )


class StorageSettings(Section):
    kind: Literal["leveldb", "hbase", "memory"] = setting("leveldb", "kind of store", reason="needs no other service")
    leveldb: LevelDbSettings = LevelDbSettings()
    hbase: HBaseSettings = HBaseSettings()


class TransactionSettings(Section):
    source: Literal["manager", "directory", "thrift", "none"] = setting(
        "manager",
        "source of transaction snapshots: the manager inside `tms serve`, a directory of snapshot files, a "
        "transaction service, or none (then nothing is inverted and no boundary is published)",
        reason="a single machine runs the manager in `tms serve`",
    )
    directory: str = setting(
        "data/messaging.tx",
        "folder of the snapshot files, and of the manager's log; a path, or for reading only "
        "webhdfs://[USER@]HOST:PORT[,HOST:PORT...]/PATH",
        reason="next to the store: storage.leveldb.path with the suffix .tx",
        place=True,
        suffix=".tx",
    )
    thrift: ListenAddress = setting(
        "127.0.0.1:15165",
        "HOST:PORT of the transaction service; with source manager, the address on which the server listens "
        "(port 0: a free port, printed)",
        reason="Tephra's default port",
    )
    token_file: Path | None = setting(
        None,
        "file with the token that the transaction service of `tms serve` requires, and that commands with these "
        "settings send; null: every client of the port may abort any transaction. Tephra's own client has no "
        "token",
        reason="Tephra's protocol has no authentication, and its clients continue to work",
        place=True,
    )
    admin_token_file: Path | None = setting(
        None,
        "file with the token that the transaction service requires to truncate the invalid list, to reset, or to "
        "return a snapshot of its state; null: every client of the service may do these",
        reason="one token is enough where all clients are trusted",
        place=True,
    )
    allow_without_token: Switch = setting(
        False,
        "allow the transaction service of `tms serve` to listen on a network address without a token, for "
        "Tephra's own clients: every client of the port may then abort any transaction",
        reason="an operator must decide to trust other machines",
    )
    tls: TlsSettings | None = setting(
        None,
        "certificate and key of the transaction service of `tms serve`; null: no TLS. Tephra's own client does not "
        "support TLS",
        reason="Tephra's protocol has no TLS, and its clients continue to work",
    )
    ca_file: Path | None = setting(
        None,
        "file with certificates (PEM) by which clients with these settings verify the transaction service, over "
        "TLS; null: they use TLS only if transactions.tls is set, and trust the system's authorities",
        reason="Tephra's protocol has no TLS",
        place=True,
    )
    hdfs_ca_file: Path | None = setting(
        None,
        "file with certificates (PEM) by which a swebhdfs:// directory is verified; null: the system's authorities",
        reason="clusters may have certificates of a public authority",
        place=True,
    )
    kerberos: KerberosSettings | None = setting(
        None,
        "Kerberos login (SPNEGO) at WebHDFS or HttpFS, for a directory that is webhdfs:// or swebhdfs://; null: none; "
        "{}: with the ticket that kinit made",
        reason="HDFS's default is none",
    )
    snapshot_interval_seconds: Count = setting(
        60,
        "interval between snapshots; the janitor does not use a snapshot older than twice this",
        unit="seconds",
        reason="CDAP's default",
    )

    @property
    def is_over_tls(self) -> bool:
        """Return whether clients with these settings connect to the transaction service over TLS."""
        return self.tls is not None or self.ca_file is not None

    max_lifetime_seconds: Count | None = setting(
        None,
        "time in which a transaction may write, as the servers enforce it (data.tx.max.lifetime); null: the janitor "
        "assumes 90000 where that is safe, and publishes no boundary",
        unit="seconds",
        reason="a boundary must not rest on a guess",
    )
    grace_seconds: CountOrZero = setting(
        86400,
        "time after the lifetime in which writes of a transaction may still arrive (data.tx.grace.period)",
        unit="seconds",
        reason="CDAP's default",
    )

    def snapshot_directory(self) -> str | None:
        """Return where a program outside the server finds snapshot files; None: it works without snapshots.

        Such a program cannot call the manager, but can read the snapshots that a manager on this machine has written.
        """
        if self.source == "directory" or (self.source == "manager" and Path(self.directory).is_dir()):
            return self.directory
        return None


class AuthRule(Section):
    """The permissions of a principal, or with ``*`` of all authenticated principals, on matching topics."""

    principal: Annotated[str, Field(min_length=1)]
    topics: tuple[RulePattern, ...] = ()
    can: Annotated[tuple[Literal["admin", "publish", "consume", "observe"], ...], Field(min_length=1)]
    consumers: Annotated[tuple[NamePattern, ...], Field(min_length=1)] = ("*",)
    producers: Annotated[tuple[NamePattern, ...], Field(min_length=1)] = ("*",)

    @model_validator(mode="after")
    def _require_topics(self) -> Self:
        if not self.topics and set(self.can) != {"observe"}:
            raise invalid("topics", "a rule that allows more than observe needs topics; write NAMESPACE:TOPIC, or *:*")
        return self


class AuthQuota(Section):
    """The quota of a principal, or with ``*`` of all principals without a separate quota."""

    principal: Annotated[str, Field(min_length=1)]
    topics: Count | None = None
    bytes_per_second: Count | None = None
    requests: Count | None = None


class AuthSettings(Section):
    kind: Literal["none", "tokens", "jwt"] = setting(
        "none",
        "authentication of requests; none accepts every request, on a loopback address only",
        reason="nothing to set up for a first try",
    )
    tokens_file: Path | None = setting(
        None,
        "for kind tokens: file of hashed tokens and their principals; the server reads a changed file again",
        reason="there is no safe default",
        place=True,
    )
    key_file: Path | None = setting(
        None,
        "for kind jwt: public keys of the issuer, a PEM file with one key or a JWKS file; the server reads a "
        "changed file again",
        reason="there is no safe default",
        place=True,
    )
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = setting(
        ("RS256", "ES256", "EdDSA"),
        "for kind jwt: allowed signature algorithms; all use a private key, none a shared secret",
        reason="what issuers use",
    )
    audience: str | None = setting(
        None,
        "for kind jwt: audience that a token must name; null: a token that names an audience is refused, because "
        "it is for another service",
        reason="not every issuer names one",
    )
    issuer: str | None = setting(
        None, "for kind jwt: issuer that a token must name; null: any", reason="a key usually has one issuer"
    )
    principal_claim: Annotated[str, Field(min_length=1)] = setting(
        "sub", "for kind jwt: claim with the principal", reason="the subject of a JWT"
    )
    rules: tuple[AuthRule, ...] = setting(
        (),
        "permissions: a list of {principal, topics, can: [admin, publish, consume, observe], consumers, "
        "producers}; principal * is every authenticated principal; consumers and producers are patterns of "
        "allowed names, by default all",
        reason="a principal has only the permissions of its rules",
    )
    quotas: tuple[AuthQuota, ...] = setting(
        (),
        "limits of principals: a list of {principal, topics, bytes_per_second, requests}; requests counts "
        "requests in flight, including waiting polls; principal * is every principal without its own entry",
        reason="suitable limits differ between installations",
    )

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.kind == "tokens" and self.tokens_file is None:
            raise invalid("tokens_file", "kind tokens needs this setting; write the path of a file")
        if self.kind == "jwt" and self.key_file is None:
            raise invalid("key_file", "kind jwt needs this setting; write the path of a PEM or JWKS file")
        if self.kind == "none" and self.quotas:
            raise invalid("quotas", "kind none has no principals; write kind: tokens or jwt, or no quotas")
        if self.kind == "none" and self.rules:
            raise invalid("rules", "kind none does not authenticate clients; write kind: tokens or jwt, or no rules")
        return self


class ConsumerSettings(Section):
    floor: Switch = setting(
        False,
        "keep a message after its topic's TTL, for all readers, until every registered consumer has read it; "
        "server and janitor need the same value",
        reason="without it, the TTL determines the space of a topic",
    )
    max_hold_seconds: Count = setting(
        86400,
        "longest time after its TTL that such a message is kept",
        unit="seconds",
        reason="a day to restart a consumer; an abandoned consumer costs no more than that",
    )
    retry_seconds: CountOrZero = setting(
        1,
        "wait of a consumer group before a failed message is delivered again, doubled after each failure; 0: no "
        "wait, so a message that always fails takes every second poll",
        unit="seconds",
        reason="a short fault passes; with max_deliveries=4 a fault of 7 s sends nothing to the dead letters",
    )
    longest_retry_seconds: Count = setting(
        60,
        "longest wait before a failed message is delivered again",
        unit="seconds",
        reason="a message that always fails costs one delivery a minute",
    )

    @property
    def hold_seconds(self) -> int | None:
        """Return the longest time that unread messages are kept after their TTL, in seconds; None: they are not."""
        return self.max_hold_seconds if self.floor else None


class LeaderSettings(Section):
    """Leadership among several servers on one HBase; no other store allows several servers."""

    advertise: Url | None = setting(
        None,
        "URL of this server for other servers on the same HBase, http://HOST:PORT or https://HOST:PORT (port 0: "
        "the port on which it listens); null: a single server, which starts only if no other server serves the store",
        reason="a single server needs none",
    )
    ca_file: Path | None = setting(
        None,
        "file with certificates (PEM) by which this server verifies other servers with an https advertise; null: "
        "the system's authorities",
        reason="the system's authorities sign servers with public names",
        place=True,
    )
    certificate_name: str = setting(
        "",
        "name in the certificates of other servers and their transaction services; empty: the host of their advertise",
        reason="certificates name hosts",
    )
    seconds: Annotated[int, Strict(), Field(ge=2, le=3600)] = setting(
        15,
        "duration of leadership without renewal; after the leader dies, no server responds for this time",
        unit="seconds",
        reason="longer than HBase takes to open a region elsewhere",
    )
    fencing_delay_seconds: CountOrZero = setting(
        5,
        "delay of a new leader before its first request, so that HBase completes writes of the former leader",
        unit="seconds",
        reason="CDAP's messaging.ha.fencing.delay.seconds",
    )
    slots: Annotated[int, Strict(), Field(ge=1, le=64)] = setting(
        1,
        "number of slots into which topics are divided, each with its own leader; the same for all servers of a store",
        unit="slots",
        reason="one server leads all topics, and the others wait",
    )
    servers: Annotated[int, Strict(), Field(ge=1, le=64)] = setting(
        1,
        "number of servers that share the slots: a slot belongs to the server whose ordinal is the slot's number "
        "modulo this",
        unit="servers",
        reason="a single server",
    )
    ordinal: Annotated[int, Strict(), Field(ge=0, le=9999)] | None = setting(
        None,
        "ordinal of this server, from 0; null: the trailing number of its host name (tms-server-2)",
        unit="an ordinal",
        reason="a StatefulSet's pods have it in their names",
    )


class PollLimitSettings(Section):
    messages: Count | None = setting(
        None,
        "most messages in the response to a poll, in Avro and JSON, whatever limit the poll has; the next poll "
        "returns the rest; null: as many as the poll requests",
        unit="messages",
        reason="responses are streamed, so a long response needs no more memory than a short one",
    )
    bytes: Count | None = setting(
        None,
        "most bytes of messages in the response to a poll, plus 160 for each message; at least one message is "
        "returned; null: no limit",
        unit="bytes",
        reason="as for messages",
    )


class ServerSettings(Section):
    host: HostName = setting(
        "127.0.0.1",
        "address on which the server listens",
        reason="without authentication only this machine may connect",
    )
    port: Port = setting(
        11015, "port on which the server listens; 0: a free port, printed", reason="CDAP's router port"
    )
    default_ttl_seconds: Count = setting(
        604800,
        "TTL of a topic that is created without a TTL",
        unit="seconds",
        reason="CDAP's 7 days",
    )
    max_request_mb: Count = setting(
        10,
        "largest request body, except polls in transactions, which also contain a list of ids (see "
        "server.max_transaction_ids); on HBase storage.hbase.max_cell_bytes limits a message too",
        unit="MB",
        reason="a whole request is held in memory",
    )
    max_transaction_ids: Count = setting(
        100_000,
        "most ids (invalid and in progress) in the transaction of a poll, 11 bytes each, up to "
        "server.max_request_mb; with the manager in this process, the length of its list plus a tenth, whatever "
        "this setting and server.max_request_mb are; the server responds 413 to a longer body",
        unit="ids",
        reason="far more ids than a cleaned invalid list has",
    )
    max_connections: Count = setting(
        500,
        "most simultaneous HTTP connections, and never more than half of the process's open files (ulimit -n); "
        "the server responds 503 to another connection and closes it",
        unit="connections",
        reason="fits the usual limit of 1024 files, of which the store needs some",
    )
    memory: Annotated[int, Strict(), Field(ge=64, le=INT_MAX)] = setting(
        256,
        "memory for all requests and responses, in addition to the cache: arriving bodies, their unpacked and "
        "decoded form, and unread responses; requests that need more wait, and the server disconnects clients "
        "that make them wait",
        unit="MB",
        reason="eight publishes of 10 MB at once",
    )
    poll_limit: PollLimitSettings = PollLimitSettings()
    access_log: Switch = setting(False, "log each request", reason="a line costs as much as a small request")
    cache_mb: CountOrZero = setting(30, "memory for recent messages; 0: none", unit="MB", reason="CDAP's default")
    system_topics: tuple[SystemTopic, ...] = setting(
        (),
        "topics to create at the start: NAMESPACE:TOPIC; NAMESPACE:TOPIC:N is TOPIC0 to TOPIC(N-1); without a "
        "namespace the topic is in system, as in CDAP's messaging.system.topics",
        reason="CDAP's own are created by CDAP",
    )
    tls: TlsSettings | None = setting(None, "certificate and key; null: plain HTTP", reason="loopback needs none")
    auth: AuthSettings = AuthSettings()
    consumers: ConsumerSettings = ConsumerSettings()
    leader: LeaderSettings = LeaderSettings()

    @model_validator(mode="after")
    def _check_memory(self) -> Self:
        if self.memory < _MEMORY_OF_REQUEST * self.max_request_mb:
            raise invalid(
                "memory",
                f"a request of {self.max_request_mb} MB (max_request_mb) needs {_MEMORY_OF_REQUEST} times as much; "
                f"write {_MEMORY_OF_REQUEST * self.max_request_mb} or more",
            )
        return self

    @model_validator(mode="after")
    def _check_host(self) -> Self:
        if self.auth.kind == "none" and not is_loopback(self.host):
            raise invalid(
                "host", f"without authentication {self.host} is open to all; write 127.0.0.1, or set server.auth"
            )
        return self


class Settings(Section):
    """The settings of ``tms``."""

    ignored_names: ClassVar[frozenset[str]] = frozenset({"janitor"})

    storage: StorageSettings = StorageSettings()
    transactions: TransactionSettings = TransactionSettings()
    server: ServerSettings = ServerSettings()

    @model_validator(mode="after")
    def _check_folders(self) -> Self:
        if self.transactions.source == "manager":
            self.require_outside_store("transactions.directory", self.transactions.directory)
        return self

    @model_validator(mode="after")
    def _check_leader(self) -> Self:
        leader = self.server.leader
        if leader.slots > 1 and leader.advertise is None:
            raise invalid("server.leader.slots", "several slots need several servers; also set server.leader.advertise")
        if leader.servers > leader.slots:
            raise invalid(
                "server.leader.servers", f"each server needs a slot, and there are {leader.slots}; set more slots"
            )
        if leader.advertise is None:
            return self
        if self.storage.kind != "hbase":
            raise invalid(
                "server.leader.advertise", "only servers on HBase can share a store; omit it, or set storage.kind"
            )
        host, _ = split_address(self.transactions.thrift)
        reached = urlsplit(leader.advertise).hostname or ""
        if self.transactions.source == "manager" and is_loopback(host) and not is_loopback(reached):
            raise invalid(
                "transactions.thrift",
                f"only this machine can connect to {host}, but with source manager the other servers connect to it; "
                f"write {reached}:15165, or 0.0.0.0:15165",
            )
        return self

    def require_outside_store(self, name: str, place: str | Path) -> None:
        """Reject a folder inside the LevelDB store, which must contain CDAP's tables only."""
        store = self.storage.leveldb.path
        if self.storage.kind != "leveldb" or "://" in str(place):
            return
        # Up to Python 3.12, Path.resolve fails in a loop of symbolic links; opening the folder reports the loop.
        if Path(os.path.realpath(place)).is_relative_to(os.path.realpath(store)):
            raise invalid(name, f"{place} lies inside the store {store}; write a folder next to it")


#: The flags of all commands, and the settings that they set.
FLAGS: Flags = {
    "leveldb": lambda folder: {"storage.kind": "leveldb", "storage.leveldb.path": folder},
    "hbase": lambda servers: {"storage.kind": "hbase", "storage.hbase.thrift": servers.replace(" ", "").split(",")},
    "snapshots": lambda place: {"transactions.source": "directory", "transactions.directory": place},
}


def load(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> LoadedSettings[Settings]:
    """Return the settings of ``tms``; flags override the environment, the file and the defaults, in this order.

    Args:
        file: a YAML file; None: the built-in standalone configuration.
        environ: ``os.environ``; names like ``TMS_STORAGE__LEVELDB__PATH``.
        flags: ``leveldb``, ``hbase``, ``snapshots``; None: the flag is not given.

    Raises:
        ConfigurationError: a setting is invalid; the message names the setting, its source and a valid value.
    """
    return load_as(Settings, file, environ, flags, FLAGS)
