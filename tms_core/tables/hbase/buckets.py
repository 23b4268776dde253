"""How many buckets salted tables have: a writer of rows must know it, a janitor that only cleans need not.

A row under a salt that is not its own is lost: CDAP never finds it. The number is configured, and CDAP's tables say it
themselves, in an attribute that only Thrift 2 reads. Rows say it, too: each lies where the right number puts it. So
before the first row is put, the configured number is held against both.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from tms_core.errors import StoreError
from tms_core.logs.loggers import get_logger
from tms_core.tables.base import TableName
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.rows import HBaseRows
from tms_core.tables.hbase.salts import SaltSample, sampled
from tms_core.tables.hbase.schema import BUCKETS_ATTRIBUTE, buckets_of, table_name

logger = get_logger(__name__)


class Buckets:
    """The configured number, held against the tables once; for any number of threads.

    Args:
        number: what is configured; None: nothing can be put.
        tables: the salted tables.
        namespace: the HBase namespace.
        admin: connections to Thrift 2 servers; None: what the tables say themselves is not read.
    """

    def __init__(
        self, number: int | None, tables: Mapping[TableName, HBaseRows], namespace: str, admin: HBasePool | None
    ) -> None:
        self._number = number
        self._tables = tables
        self._namespace = namespace
        self._admin = admin
        self._lock = threading.Lock()
        self._checked = False

    @property
    def known(self) -> int | None:
        """The number, once it was checked."""
        return self._number if self._checked else None

    def checked(self) -> int:
        """The number, which the tables do not contradict.

        Raises:
            StoreError: none is configured, it is not the tables' own, or they could not be asked.
        """
        if self._number is None:
            raise StoreError("Rows cannot be put without the number of buckets.", "Set storage.hbase.buckets.")
        with self._lock:
            if not self._checked:
                self._check(self._number)
                self._checked = True
        return self._number

    def _check(self, number: int) -> None:
        said = self._said()
        for table, own in said.items():
            if own != number:
                raise StoreError(
                    f"{self._name(table)} has {own} buckets, and storage.hbase.buckets is {number}.",
                    f"Set storage.hbase.buckets to {own}.",
                )
        samples = {table: sampled(rows) for table, rows in self._tables.items()}
        for table, sample in samples.items():
            if not sample.fits(number):
                raise self._misfit(table, sample, number)
        if not said and not any(sample.rows for sample in samples.values()):
            logger.info(
                "storage.hbase.buckets is assumed to be %d: the tables of %s are empty, and without "
                "storage.hbase.thrift2 their own number cannot be read",
                number,
                self._namespace,
            )

    def _said(self) -> dict[TableName, int]:
        """The number of buckets that the tables themselves tell, where they do."""
        if self._admin is None:
            return {}
        said = {table: buckets_of(self._admin, self._namespace, table) for table in self._tables}
        return {table: own for table, own in said.items() if own is not None}

    def _misfit(self, table: TableName, sample: SaltSample, number: int) -> StoreError:
        own = sample.best()
        return StoreError(
            f"{self._name(table)} does not have {number} buckets, as storage.hbase.buckets says: "
            f"{len(sample.rows) - sample.agreeing(number)} of {len(sample.rows)} rows lie under another salt.",
            f"Set storage.hbase.buckets to {own or f'what describe shows in the HBase shell as {BUCKETS_ATTRIBUTE}'}.",
        )

    def _name(self, table: TableName) -> str:
        return table_name(self._namespace, table).decode()
