"""CDAP's three tables in HBase: their names and cells, and their creation.

Thrift 1 cannot create a namespace, split a table in advance or set table attributes, and CDAP rejects tables without
its attributes. Therefore tables are created over Thrift 2, or by an operator with the HBase shell and the script of
this module. Rows need only Thrift 1, and so does the janitor's own table, a plain table next to CDAP's. See
``docs/reference/formats/tables.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tms_core.errors import StoreError, StoreNotFound, quoted
from tms_core.tables.base import TableName
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.thrift import interface
from tms_core.topic import parse_java_int

#: A salt is one byte.
MAX_BUCKETS = 256
#: One column family, ``d``; a column is the family, a colon and the qualifier.
FAMILY = b"d"
#: CDAP writes its qualifiers, which are letters, as Java ints of four bytes; the metadata's qualifier is one byte.
PAYLOAD_COLUMN = b"d:\x00\x00\x00p"
POINTER_COLUMN = b"d:\x00\x00\x00t"
PAYLOAD_TABLE_COLUMN = b"d:\x00\x00\x00c"
METADATA_COLUMN = b"d:m"

#: The seconds of an unlimited TTL.
FOREVER_SECONDS = 2**31 - 1

#: The table attribute with the number of buckets, which overrides CDAP's configuration.
BUCKETS_ATTRIBUTE = "cdap.messaging.key.distributor.buckets"

#: CDAP's policy since 4.3: regions are never split, so a region is a bucket.
SPLIT_POLICY = "org.apache.hadoop.hbase.regionserver.DisabledRegionSplitPolicy"
#: The janitor's table next to CDAP's tables.
JANITOR_TABLE = "tms.janitor"

_NAMES: dict[TableName, str] = {"metadata": "tms.meta", "message": "tms.message", "payload": "tms.payload"}
_SYSTEM = "_system"


def table_name(namespace: str, table: TableName) -> bytes:
    """Return a table's name in HBase, such as ``cdap_system:tms.message``."""
    return f"{namespace}:{_NAMES[table]}".encode()


def thrift_table_name(namespace: str, table: TableName) -> Any:
    """Return a table's name as a struct of Thrift 2."""
    return interface().TableName(space=namespace.encode(), name=_NAMES[table].encode())


@dataclass(frozen=True)
class TableSpec:
    """The specification of a table to create.

    Attributes:
        namespace: the HBase namespace.
        compression: the compression of its files: NONE, SNAPPY, GZ, LZ4, ZSTD.
        buckets: the number of regions, one for each salt; None: one region, and rows without salt.
    """

    namespace: str
    name: str
    compression: str
    attributes: dict[str, str] = field(default_factory=dict)
    buckets: int | None = None

    @property
    def full_name(self) -> str:
        """Return namespace and name."""
        return f"{self.namespace}:{self.name}"

    @property
    def split_keys(self) -> list[bytes]:
        """Return the salts at which regions start, except the first."""
        return [bytes([salt]) for salt in range(1, self.buckets or 1)]

    def descriptor(self) -> Any:
        """Return the table's descriptor for Thrift 2."""
        thrift = interface()
        family = thrift.Family(
            name=FAMILY,
            bloom=thrift.Bloom.ROW,
            compression=getattr(thrift.Compression, self.compression),
            maxVersions=1,
        )
        attributes = {name.encode(): value.encode() for name, value in self.attributes.items()}
        return thrift.TableDescriptor(table=self.thrift_name(), families=[family], attributes=attributes)

    def families(self) -> dict[str, dict[str, Any]]:
        """Return the column families for happybase; Thrift 1 has neither attributes nor regions."""
        family = {
            "max_versions": 1,
            "compression": self.compression,
            "bloom_filter_type": "ROW",
            "block_cache_enabled": True,
            "time_to_live": FOREVER_SECONDS,
        }
        return {FAMILY.decode(): family}

    def thrift_name(self) -> Any:
        """Return the name as a struct of Thrift 2."""
        return interface().TableName(space=self.namespace.encode(), name=self.name.encode())

    def shell_line(self) -> str:
        """Return the command that creates the table in the HBase shell."""
        family = f"{{NAME => 'd', VERSIONS => 1, BLOOMFILTER => 'ROW', COMPRESSION => '{self.compression}'}}"
        parts = [f"create '{self.full_name}'", family]
        if self.attributes:
            pairs = ", ".join(f"'{name}' => '{value}'" for name, value in self.attributes.items())
            parts.append(f"METADATA => {{{pairs}}}")
        if self.split_keys:
            parts.append("SPLITS => [" + ", ".join(f'"\\x{key.hex()}"' for key in self.split_keys) + "]")
        return ", ".join(parts)


def table_specs(namespace: str, buckets: int, compression: str) -> list[TableSpec]:
    """Return the three tables as CDAP creates them.

    They have no version attributes, which name the CDAP that wrote them, and no coprocessors, because with ``janitor``
    no code runs inside the region servers.

    Args:
        namespace: the HBase namespace, ``<prefix>_system`` in CDAP.
        buckets: salts of the message and the payload table, 1 to 256.
        compression: NONE, SNAPPY (CDAP's default; the region servers need its library), GZ, LZ4 or ZSTD.
    """
    general = {"dataset.table.prefix": namespace.removesuffix(_SYSTEM)} if namespace.endswith(_SYSTEM) else {}
    salted = general | {
        "cdap.messaging.table.prefix.num.bytes": "1",
        BUCKETS_ATTRIBUTE: str(buckets),
        "cdap.messaging.metadata.hbase.namespace": namespace,
        "SPLIT_POLICY": SPLIT_POLICY,
    }
    return [
        TableSpec(namespace, _NAMES["metadata"], compression, general),
        TableSpec(namespace, _NAMES["message"], compression, salted, buckets),
        TableSpec(namespace, _NAMES["payload"], compression, salted, buckets),
    ]


def janitor_table_spec(namespace: str) -> TableSpec:
    """Return the janitor's own table: a few megabytes, which the janitor compresses itself."""
    return TableSpec(namespace, JANITOR_TABLE, "NONE")


def shell_script(specs: list[TableSpec]) -> str:
    """Return the script that creates the namespace and the tables in the HBase shell."""
    lines = [f"create_namespace '{specs[0].namespace}'", *(spec.shell_line() for spec in specs)]
    # With -n (not interactive), the shell stops at the first error.
    return "\n".join(["# Run without -n: a create of an existing table fails and changes nothing.", *lines, ""])


def create_tables(admin: HBasePool, specs: list[TableSpec]) -> list[str]:
    """Create missing tables; existing tables stay as they are.

    Args:
        admin: connections to a Thrift 2 server.

    Returns:
        The full names of the created tables.

    Raises:
        StoreError: HBase could not create a table, or a table exists with another number of buckets.
    """
    namespace = specs[0].namespace.encode()
    if namespace not in admin.call("listNamespaces"):
        try:
            with admin.connection() as connection:
                connection.call("createNamespace", interface().NamespaceDescriptor(name=namespace))
        except StoreError:
            # Another process may have created it at the same time.
            if namespace not in admin.call("listNamespaces"):
                raise
    return [spec.full_name for spec in specs if _create(admin, spec)]


def buckets_of(admin: HBasePool, namespace: str, table: TableName) -> int | None:
    """Return the number of buckets in the attribute of a table; None without the attribute.

    Args:
        admin: connections to a Thrift 2 server.

    Raises:
        StoreError: the attribute could not be read, or is not a number.
        StoreNotFound: the table does not exist.
    """
    spec = TableSpec(namespace, _NAMES[table], "NONE")
    if not admin.call("tableExists", spec.thrift_name()):
        raise StoreNotFound(f"Table {spec.full_name} does not exist.", "Create it: tms admin create-tables.")
    return _buckets(admin, spec)


def attributes_of(admin: HBasePool, namespace: str, table: TableName) -> dict[str, str]:
    """Return a table's attributes: CDAP's, HBase's own, and one for each coprocessor.

    Args:
        admin: connections to a Thrift 2 server.

    Raises:
        StoreNotFound: the table does not exist.
        StoreError: HBase could not be reached.
    """
    return texts(admin.call("getTableDescriptor", thrift_table_name(namespace, table)).attributes)


def texts(attributes: Mapping[bytes, bytes] | None) -> dict[str, str]:
    """Return the attributes of a descriptor as text."""
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in (attributes or {}).items()}


def _create(admin: HBasePool, spec: TableSpec) -> bool:
    if not admin.call("tableExists", spec.thrift_name()):
        try:
            with admin.connection() as connection:
                connection.call("createTable", spec.descriptor(), spec.split_keys)
            return True
        except StoreError:
            if not admin.call("tableExists", spec.thrift_name()):
                raise
    present = _buckets(admin, spec)
    if spec.buckets is not None and present != spec.buckets:
        raise StoreError(
            f"{spec.full_name} exists with {present or 'no'} buckets, not {spec.buckets}.",
            f"Set storage.hbase.buckets to {present}." if present else "CDAP did not create it; drop or rename it.",
        )
    return False


def _buckets(admin: HBasePool, spec: TableSpec) -> int | None:
    attributes = admin.call("getTableDescriptor", spec.thrift_name()).attributes or {}
    value: bytes | None = attributes.get(BUCKETS_ATTRIBUTE.encode())
    if value is None:
        return None
    number = read_buckets(value.decode(errors="replace"))
    if number is None:
        raise StoreError(
            f"{spec.full_name} has {BUCKETS_ATTRIBUTE} {quoted(value)}, which is not a number from 1 to 256.",
            "Check the attribute in the HBase shell (describe).",
        )
    return number


def read_buckets(text: str) -> int | None:
    """Return the number of buckets in a table's attribute; None if the text is not a valid number of buckets."""
    number = parse_java_int(text)
    return number if number is not None and 1 <= number <= MAX_BUCKETS else None
