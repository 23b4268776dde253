"""The settings of store, transactions and server, each with its meaning, unit, default and the reason for it.

The janitor's own section is the janitor's (``janitor.settings``): this package serves messages without it and leaves
what stands under ``janitor:`` alone. ``docs/reference/configuration.md`` is made from the models.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, Strict, model_validator

from tms_core.settings.fields import Section, setting, wrong
from tms_core.settings.layers import Flags, LoadedSettings, load_as
from tms_core.topic import INT_MAX, TopicId

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
#: What a shell pattern over ``namespace:topic`` can be made of.
_PATTERN = re.compile(r"[A-Za-z0-9_:*?\[\]!-]+")
#: The same, of a rule: a pattern of namespaces and one of topics.
_RULE_PATTERN = re.compile(r"[A-Za-z0-9_*?\[\]!-]+:[A-Za-z0-9_*?\[\]!-]+")
_MAX_PORT = 65535
#: How much memory the largest request needs, and a poll that reads it again, as a multiple of its size.
_MEMORY_OF_REQUEST = 6
#: How many topics one entry may stand for; CDAP's own have ten.
_MOST_NUMBERED = 1000


def _address(address: str) -> str:
    _, port = split_address(address)
    if not port:
        raise ValueError("this is not HOST:PORT")
    return address


def _address_or_any_port(address: str) -> str:
    split_address(address)
    return address


#: What a transaction may live where that is not set (``transactions.max_lifetime_seconds``); Tephra's own default
#: (data.tx.max.lifetime).
ASSUMED_LIFETIME_SECONDS = 90_000


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; an IPv6 address stands in brackets and comes without.

    Raises:
        ValueError: it is none.
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
    expanded(entry)
    return entry


def expanded(entry: str) -> list[TopicId]:
    """Return the topics of an entry of ``server.system_topics``: ``[NAMESPACE:]TOPIC[:N]``.

    Without a namespace it is ``system``, as CDAP's topics. With a number, the topics are ``TOPIC0`` to ``TOPIC(N-1)``,
    as in ``messaging.system.topics`` (``MessagingServiceUtils``). Therefore a numeric last part is never a topic's
    name.

    Raises:
        ValueError: the entry is invalid.
    """
    *names, last = entry.split(":")
    count = int(last) if names and last.isdecimal() else None
    if count is None:
        names.append(last)
    elif not 1 <= count <= _MOST_NUMBERED:
        raise ValueError(f"numbered topics are 1 to {_MOST_NUMBERED}; a topic is written NAMESPACE:TOPIC")
    topic = TopicId.parse(":".join(names if len(names) > 1 else ["system", *names]))
    return [topic] if count is None else [TopicId.parse(f"{topic}{number}") for number in range(count)]


def _pattern(pattern: str) -> str:
    if not _PATTERN.fullmatch(pattern) or not set(":*") & set(pattern):
        raise ValueError("this matches no topic; a topic is written NAMESPACE:TOPIC, a pattern default:audit*")
    return pattern


def _rule_pattern(pattern: str) -> str:
    # One pattern for both would have ``prod*`` match ``prod_secret:x``.
    if not _RULE_PATTERN.fullmatch(pattern):
        raise ValueError(
            "a rule's topics are written NAMESPACE:TOPIC, with a pattern on each side: default:audit*, *:*"
        )
    return pattern


def is_loopback(host: str) -> bool:
    """Return whether only programs of this machine reach a host: ``localhost``, 127.0.0.0/8, ::1."""
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
#: How a JWT may be signed: all of these with a private key, so that nothing kept here could sign one.
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


class TlsSettings(Section):
    certificate: Path = setting(
        ...,
        "the certificate chain, a PEM file; read again when it changes",
        reason="there is no safe default",
        place=True,
    )
    key: Path = setting(
        ..., "its private key, a PEM file that other users cannot read", reason="there is no safe default", place=True
    )


class ClientTlsSettings(Section):
    ca_file: Path | None = setting(
        None,
        "certificates, in PEM, of the authorities that sign the servers' certificates; read again when it changes; "
        "null: the system's authorities",
        reason="servers may have certificates of a public authority",
        place=True,
    )
    server_name: Annotated[str, Field(min_length=1)] | None = setting(
        None,
        "the name that the servers' certificates must have; null: the host of each address",
        reason="certificates name hosts",
    )
    certificate: Path | None = setting(
        None,
        "the client's certificate chain, a PEM file; read again when it changes; null: the client shows none",
        reason="few servers ask for one",
        place=True,
    )
    key: Path | None = setting(
        None,
        "the private key of certificate, a PEM file that other users cannot read",
        reason="as for certificate",
        place=True,
    )

    @model_validator(mode="after")
    def _key_of_its_certificate(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            missing = "certificate" if self.certificate is None else "key"
            raise wrong(missing, "certificate and key belong together; set both, or none")
        return self


class KerberosSettings(Section):
    principal: Annotated[str, Field(min_length=1)] | None = setting(
        None,
        "who logs in, such as janitor@EXAMPLE.COM; null: whose ticket the cache has, or the first of the keytab",
        reason="a keytab mostly has one principal",
    )
    keytab: Path | None = setting(
        None,
        "a file with the principal's key, which other users cannot read: tickets are fetched and renewed by it; null: "
        "another program keeps a ticket in the cache",
        reason="there is no safe default",
        place=True,
    )
    ticket_cache: Annotated[str, Field(min_length=1)] | None = setting(
        None,
        "without a keytab: the ticket cache, such as FILE:/run/janitor/tickets; null: KRB5CCNAME, or the system's",
        reason="where kinit puts tickets",
    )


class HBaseKerberosSettings(KerberosSettings):
    service: Annotated[str, Field(pattern=r"^[^/@\s]+/[^/@\s]+(@[^/@\s]+)?$")] = setting(
        "hbase/_HOST",
        "the principal of the Thrift servers, HBase's hbase.thrift.kerberos.principal; _HOST is the host of each "
        "address, and without @REALM the realm is krb5.conf's",
        reason="HBase's custom",
    )


class LevelDbSettings(Section):
    path: Path = setting(
        Path("data/messaging"),
        "the folder with system.tms.meta, system.tms.message and system.tms.payload, and nothing else",
        reason="beside the other data of a checkout",
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
        "HOST:PORT of each HBase Thrift 2 server; null: the descriptors of the tables are not read",
        reason="cleaning needs the first interface only",
    )
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")] = setting(
        "cdap_system", "the HBase namespace of the tables", reason="where CDAP puts its system tables"
    )
    tls: ClientTlsSettings | None = setting(
        None,
        "TLS of the Thrift connections; null: none; {}: by the system's authorities, without a certificate",
        reason="HBase's Thrift servers speak TLS over HTTP only",
    )
    kerberos: HBaseKerberosSettings | None = setting(
        None,
        "Kerberos login (SASL) at Thrift servers that demand it (hbase.thrift.security.qop); null: none; {}: with the "
        "ticket that kinit made",
        reason="HBase's default is none",
    )
    connections: Count = setting(
        4, "Thrift connections kept open", unit="connections", reason="as many as the janitor has workers"
    )
    timeout_seconds: Count = setting(
        30,
        "how long one call may take before its connection is closed and never used again",
        unit="seconds",
        reason="long enough for a page during a region's move; no call may hang for ever",
    )
    buckets: Annotated[int, Strict(), Field(ge=1, le=256)] = setting(
        16,
        "salt buckets of created tables and of written rows; refused if the tables have another number",
        unit="buckets",
        reason="CDAP's default",
    )
    max_cell_bytes: Annotated[int, Strict(), Field(ge=1 << 16, le=INT_MAX)] = setting(
        MAX_CELL_BYTES,
        "the largest cell that HBase accepts, its hbase.client.keyvalue.maxsize and hbase.server.keyvalue.maxsize; a "
        "message within 1 KiB of it, which its key may take, or above it is answered 413",
        unit="bytes",
        reason="HBase's default",
    )


class StorageSettings(Section):
    kind: Literal["leveldb", "hbase", "memory"] = setting(
        "leveldb", "which store holds the tables", reason="needs nothing to be installed"
    )
    leveldb: LevelDbSettings = LevelDbSettings()
    hbase: HBaseSettings = HBaseSettings()


class TransactionSettings(Section):
    source: Literal["manager", "directory", "thrift", "none"] = setting(
        "manager",
        "where transaction snapshots come from: the manager inside `tms serve`, a directory of snapshot files, a "
        "transaction service, or nowhere (then nothing is inverted and no boundary claimed)",
        reason="on one machine the manager is there",
    )
    directory: str = setting(
        "data/messaging.tx",
        "where snapshot files are, and where the manager writes its own: a path, or, to read only, "
        "webhdfs://[USER@]HOST:PORT[,HOST:PORT...]/PATH",
        reason="next to the store: storage.leveldb.path with the suffix .tx",
        place=True,
        beside=".tx",
    )
    thrift: ListenAddress = setting(
        "127.0.0.1:15165",
        "HOST:PORT of the transaction service; with source manager where `tms serve` listens (port 0: a free one, "
        "printed)",
        reason="Tephra's default port",
    )
    token_file: Path | None = setting(
        None,
        "a file with a token that the transaction service of `tms serve` demands, and that commands which read these "
        "settings show it; null: every client of the port may abort any transaction. Tephra's own client has no token",
        reason="Tephra's protocol has no authentication, and its clients go on working",
        place=True,
    )
    admin_token_file: Path | None = setting(
        None,
        "a file with another token, without which the transaction service neither truncates the invalid list, resets, "
        "nor gives a snapshot of its state; null: every client of the service may do these too",
        reason="one token is enough where all clients are trusted",
        place=True,
    )
    allow_without_token: Switch = setting(
        False,
        "whether the transaction service of `tms serve` may listen on an address of the network without a token, for "
        "Tephra's own clients: every client of the port may then abort any transaction",
        reason="other machines have to be trusted first",
    )
    tls: TlsSettings | None = setting(
        None,
        "certificate and key of the transaction service of `tms serve`; null: it speaks no TLS. Tephra's own client "
        "speaks none",
        reason="Tephra's protocol has no TLS, and its clients go on working",
    )
    ca_file: Path | None = setting(
        None,
        "a file with the certificates, in PEM, by which clients that read these settings know the transaction service, "
        "over TLS; null: they speak TLS only where transactions.tls is set, and trust the system's authorities",
        reason="Tephra's protocol has no TLS",
        place=True,
    )
    hdfs_ca_file: Path | None = setting(
        None,
        "for a directory that is swebhdfs://: a file with the certificates, in PEM, by which HDFS is known; null: the "
        "system's authorities",
        reason="clusters may have certificates of a public authority",
        place=True,
    )
    kerberos: KerberosSettings | None = setting(
        None,
        "Kerberos login (SPNEGO) at WebHDFS or HttpFS, for a directory that is webhdfs:// or swebhdfs://; null: none; "
        "{}: with the ticket that kinit made",
        reason="HDFS' default is none",
    )
    snapshot_interval_seconds: Count = setting(
        60,
        "how often a snapshot is written; one older than twice this is not used",
        unit="seconds",
        reason="CDAP's default",
    )

    @property
    def shown_token_file(self) -> Path | None:
        """Return the file of the token that this process sends: the one with more permissions."""
        return self.admin_token_file or self.token_file

    @property
    def is_over_tls(self) -> bool:
        """Return whether clients that read these settings speak TLS with the transaction service."""
        return self.tls is not None or self.ca_file is not None

    max_lifetime_seconds: Count | None = setting(
        None,
        "how long a transaction may write, as the servers enforce it (data.tx.max.lifetime); null: 90000 is assumed "
        "where that is safe, and no boundary is claimed",
        unit="seconds",
        reason="a claim must not rest on a guess",
    )
    grace_seconds: CountOrZero = setting(
        86400,
        "how long after its lifetime a transaction's writes may still arrive (data.tx.grace.period)",
        unit="seconds",
        reason="CDAP's default",
    )

    def snapshot_directory(self) -> str | None:
        """Return where a program outside the server finds snapshot files; None: it works without.

        A manager is out of reach there, but it writes its snapshots into ``directory``, if it ever ran on this machine.
        """
        if self.source == "directory" or (self.source == "manager" and Path(self.directory).is_dir()):
            return self.directory
        return None


class AuthRule(Section):
    """What a principal, or with ``*`` each that is known, may do on the topics that match."""

    principal: Annotated[str, Field(min_length=1)]
    topics: tuple[RulePattern, ...] = ()
    can: Annotated[tuple[Literal["admin", "publish", "consume", "observe"], ...], Field(min_length=1)]
    consumers: Annotated[tuple[NamePattern, ...], Field(min_length=1)] = ("*",)
    producers: Annotated[tuple[NamePattern, ...], Field(min_length=1)] = ("*",)

    @model_validator(mode="after")
    def _about_topics(self) -> Self:
        if not self.topics and set(self.can) != {"observe"}:
            raise wrong("topics", "a rule that allows more than observe needs it; write NAMESPACE:TOPIC, or *:*")
        return self


class AuthQuota(Section):
    """What a principal, or with ``*`` each that has no quota of its own, may use at most."""

    principal: Annotated[str, Field(min_length=1)]
    topics: Count | None = None
    bytes_per_second: Count | None = None
    requests: Count | None = None


class AuthSettings(Section):
    kind: Literal["none", "tokens", "jwt"] = setting(
        "none",
        "how a request proves who sent it; none accepts every request, on a loopback address only",
        reason="nothing to set up for a first try",
    )
    tokens_file: Path | None = setting(
        None,
        "for kind tokens: the file of hashed tokens and their principals; read again when it changes",
        reason="there is no safe default",
        place=True,
    )
    key_file: Path | None = setting(
        None,
        "for kind jwt: the public keys of the issuer, a PEM file of one or a JWKS file; read again when it changes",
        reason="there is no safe default",
        place=True,
    )
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = setting(
        ("RS256", "ES256", "EdDSA"),
        "for kind jwt: how tokens may be signed; only with a private key, never with a shared secret or not at all",
        reason="what issuers use",
    )
    audience: str | None = setting(
        None,
        "for kind jwt: the audience a token must name; null: a token that names one is meant for others and refused",
        reason="not every issuer names one",
    )
    issuer: str | None = setting(
        None, "for kind jwt: the issuer a token must name; null: any", reason="a key usually has one issuer"
    )
    principal_claim: Annotated[str, Field(min_length=1)] = setting(
        "sub", "for kind jwt: the claim that names the principal of the rules", reason="where JWT has the subject"
    )
    rules: tuple[AuthRule, ...] = setting(
        (),
        "permissions: a list of {principal, topics, can: [admin, publish, consume, observe], consumers, "
        "producers}; principal * is each that is known; consumers and producers are patterns of the names that consume "
        "and publish may use, by default all",
        reason="a principal has only the permissions of its rules",
    )
    quotas: tuple[AuthQuota, ...] = setting(
        (),
        "what each principal may use at most: a list of {principal, topics, bytes_per_second, requests}; requests are "
        "those in flight, polls that wait included; principal * is each that is not named",
        reason="how much is too much differs from site to site",
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind == "tokens" and self.tokens_file is None:
            raise wrong("tokens_file", "kind tokens needs it; write the path of a file")
        if self.kind == "jwt" and self.key_file is None:
            raise wrong("key_file", "kind jwt needs it; write the path of a PEM or JWKS file")
        if self.kind == "none" and self.quotas:
            raise wrong("quotas", "kind none does not know principals; write kind: tokens or jwt, or no quotas")
        if self.kind == "none" and self.rules:
            raise wrong("rules", "kind none does not authenticate clients; write kind: tokens or jwt, or no rules")
        return self


class ConsumerSettings(Section):
    floor: Switch = setting(
        False,
        "whether a message lives on after its topic's ttl, for all readers, as long as a registered consumer has not "
        "read it; server and janitor both go by it",
        reason="without it a topic's ttl says how much space the topic takes",
    )
    max_hold_seconds: Count = setting(
        86400,
        "how long after its ttl such a message lives at most, even if a consumer has not read it",
        unit="seconds",
        reason="a day to bring a consumer back; one that never comes costs no more than that",
    )
    retry_seconds: CountOrZero = setting(
        1,
        "wait of a consumer group before a message that failed comes again, doubled after each failure; 0: no wait, "
        "and a message that always fails takes every second poll",
        unit="seconds",
        reason="a short fault passes, and with max_deliveries=4 a fault of 7 s sends nothing to the dead letters",
    )
    longest_retry_seconds: Count = setting(
        60,
        "longest wait before a message that failed comes again",
        unit="seconds",
        reason="a message that always fails costs one delivery a minute",
    )

    @property
    def hold_seconds(self) -> int | None:
        """Return how long unread messages are held after their ttl; None: not at all."""
        return self.max_hold_seconds if self.floor else None


class LeaderSettings(Section):
    """Which of several servers on one HBase publishes and reads; nowhere else can there be several."""

    advertise: Url | None = setting(
        None,
        "where the other servers on the same HBase reach this one, http://HOST:PORT or https://HOST:PORT (port 0: the "
        "one it listens at); null: it stands alone, and starts only when no other one serves",
        reason="one server needs none",
    )
    ca_file: Path | None = setting(
        None,
        "a file with the certificates, in PEM, by which this server knows the other servers where their advertise is "
        "https; null: those of the system",
        reason="the system's authorities sign servers that have public names",
        place=True,
    )
    certificate_name: str = setting(
        "",
        "the name in the certificates of the other servers and of their transaction services; empty: the host of their "
        "advertise",
        reason="certificates name hosts",
    )
    seconds: Annotated[int, Strict(), Field(ge=2, le=3600)] = setting(
        15,
        "how long the lead lasts without being renewed, so for how long no instance answers when its holder has died",
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
        "into how many slots topics are divided, each with a leader of its own; all servers of a store have the same "
        "number",
        unit="slots",
        reason="one server leads everything, and the others stand by",
    )
    servers: Annotated[int, Strict(), Field(ge=1, le=64)] = setting(
        1,
        "how many servers share the slots: a slot belongs to the server whose ordinal is the slot's number modulo this",
        unit="servers",
        reason="as many as there are",
    )
    ordinal: Annotated[int, Strict(), Field(ge=0, le=9999)] | None = setting(
        None,
        "which of the servers this is, from 0; null: the trailing number of its host name (tms-server-2)",
        unit="an ordinal",
        reason="a StatefulSet's pods have it in their names",
    )


class PollLimitSettings(Section):
    messages: Count | None = setting(
        None,
        "messages that a poll is answered at most, in Avro and in JSON, whatever limit it names; what is cut off is "
        "read by the next poll; null: as many as it asks for",
        unit="messages",
        reason="answers are sent while they are read, so that a long one takes no more memory than a short one",
    )
    bytes: Count | None = setting(
        None,
        "bytes of messages that a poll is answered at most, with 160 more for each message; at least one message "
        "comes; null: as many as there are",
        unit="bytes",
        reason="as for messages",
    )


class ServerSettings(Section):
    host: HostName = setting(
        "127.0.0.1", "the address to listen at", reason="without authentication only this machine may connect"
    )
    port: Port = setting(11015, "the port to listen at; 0: a free one, printed", reason="CDAP's router port")
    default_ttl_seconds: Count = setting(
        604800,
        "how long messages of a topic live that is created without a ttl",
        unit="seconds",
        reason="CDAP's 7 days",
    )
    max_request_mb: Count = setting(
        10,
        "the largest request body, but for polls in transactions, which may be larger with the list of ids (see "
        "server.max_transaction_ids); on HBase a message is also limited by storage.hbase.max_cell_bytes",
        unit="MB",
        reason="a request is held in memory whole",
    )
    max_transaction_ids: Count = setting(
        100_000,
        "ids, invalid and in progress, that the transaction of a poll may carry, 11 bytes each, up to "
        "server.max_request_mb; with the transaction manager in this process as many as its list has and a tenth more, "
        "whatever this number and server.max_request_mb are; a longer body is answered 413",
        unit="ids",
        reason="far more than a transaction system has whose invalid transactions are cleaned up",
    )
    max_connections: Count = setting(
        500,
        "connections over HTTP at once, and never more than half of the files that the process may open (ulimit -n); "
        "one too many is answered 503 and closed",
        unit="connections",
        reason="fits the usual limit of 1024 files, of which the store needs some",
    )
    memory: Annotated[int, Strict(), Field(ge=64, le=INT_MAX)] = setting(
        256,
        "memory that requests and answers take together, beside the cache: arriving bodies, their "
        "unpacked and decoded form, and unread responses; requests that need more wait, and "
        "clients that keep them waiting are cut off",
        unit="MB",
        reason="eight publishes of 10 MB at once",
    )
    poll_limit: PollLimitSettings = PollLimitSettings()
    access_log: Switch = setting(
        False, "whether each request is logged", reason="a line costs as much as a small request"
    )
    cache_mb: CountOrZero = setting(30, "memory for recent messages; 0: none", unit="MB", reason="CDAP's default")
    system_topics: tuple[SystemTopic, ...] = setting(
        (),
        "topics created at start: NAMESPACE:TOPIC; NAMESPACE:TOPIC:N is TOPIC0 to TOPIC(N-1); without a namespace it "
        "is system, as in CDAP's messaging.system.topics",
        reason="CDAP's own are created by CDAP",
    )
    tls: TlsSettings | None = setting(None, "certificate and key; null: plain HTTP", reason="loopback needs none")
    auth: AuthSettings = AuthSettings()
    consumers: ConsumerSettings = ConsumerSettings()
    leader: LeaderSettings = LeaderSettings()

    @model_validator(mode="after")
    def _holds_a_request(self) -> Self:
        if self.memory < _MEMORY_OF_REQUEST * self.max_request_mb:
            raise wrong(
                "memory",
                f"a request of {self.max_request_mb} MB (max_request_mb) needs {_MEMORY_OF_REQUEST} times as much; "
                f"write {_MEMORY_OF_REQUEST * self.max_request_mb} or more",
            )
        return self

    @model_validator(mode="after")
    def _loopback_without_authentication(self) -> Self:
        if self.auth.kind == "none" and not is_loopback(self.host):
            raise wrong(
                "host", f"without authentication {self.host} is open to all; write 127.0.0.1, or set server.auth"
            )
        return self


class Settings(Section):
    """The settings of ``tms``."""

    left_alone: ClassVar[frozenset[str]] = frozenset({"janitor"})

    storage: StorageSettings = StorageSettings()
    transactions: TransactionSettings = TransactionSettings()
    server: ServerSettings = ServerSettings()

    @model_validator(mode="after")
    def _beside_the_store(self) -> Self:
        if self.transactions.source == "manager":
            self.require_beside_store("transactions.directory", self.transactions.directory)
        return self

    @model_validator(mode="after")
    def _several_servers(self) -> Self:
        leader = self.server.leader
        if leader.slots > 1 and leader.advertise is None:
            raise wrong("server.leader.slots", "several slots are for several servers; set server.leader.advertise too")
        if leader.servers > leader.slots:
            raise wrong(
                "server.leader.servers", f"{leader.slots} slots are for at most as many servers; set more slots"
            )
        if leader.advertise is None:
            return self
        if self.storage.kind != "hbase":
            raise wrong(
                "server.leader.advertise", "several servers can share an HBase only; leave it out, or set storage.kind"
            )
        host, _ = split_address(self.transactions.thrift)
        reached = urlsplit(leader.advertise).hostname or ""
        if self.transactions.source == "manager" and is_loopback(host) and not is_loopback(reached):
            raise wrong(
                "transactions.thrift",
                f"{host} is reached from this machine only, and with source manager the other servers ask the leader "
                f"there; write {reached}:15165, or 0.0.0.0:15165",
            )
        return self

    def require_beside_store(self, name: str, place: str | Path) -> None:
        """Reject a folder inside LevelDB's folders, which must contain CDAP's tables only."""
        store = self.storage.leveldb.path
        if self.storage.kind != "leveldb" or "://" in str(place):
            return
        if Path(place).resolve().is_relative_to(store.resolve()):
            raise wrong(name, f"{place} lies inside the store {store}; write a folder beside it")


#: What the flags that every command has set.
FLAGS: Flags = {
    "leveldb": lambda folder: {"storage.kind": "leveldb", "storage.leveldb.path": folder},
    "hbase": lambda servers: {"storage.kind": "hbase", "storage.hbase.thrift": servers.replace(" ", "").split(",")},
    "snapshots": lambda place: {"transactions.source": "directory", "transactions.directory": place},
}


def load(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> LoadedSettings[Settings]:
    """Return the settings of ``tms``, from flags, else the environment, else the file, else the defaults.

    Args:
        file: a YAML file; None: the built-in standalone configuration.
        environ: ``os.environ``; names like ``TMS_STORAGE__LEVELDB__PATH``.
        flags: ``leveldb``, ``hbase``, ``snapshots``; None is a flag not given.

    Raises:
        ConfigurationError: names the setting, where it came from and what to write.
    """
    return load_as(Settings, file, environ, flags, FLAGS)
