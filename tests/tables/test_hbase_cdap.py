"""Detection of CDAP's observers in table attributes."""

from __future__ import annotations

import pytest

from tms_core.tables.hbase.cdap import observers

TABLE = "cdap_system:tms.message"
PACKAGE = "cdap.data2.transaction.messaging.coprocessor"


@pytest.mark.parametrize(
    ("java_class", "name"),
    [
        (f"co.cask.{PACKAGE}.hbase11.MessageTableRegionObserver", "MessageTableRegionObserver"),
        (f"co.cask.{PACKAGE}.hbase12cdh570.PayloadTableRegionObserver", "PayloadTableRegionObserver"),
        (f"io.cdap.{PACKAGE}.hbase20.MessageTableRegionObserver", "MessageTableRegionObserver"),
        ("org.apache.tephra.hbase.coprocessor.TransactionProcessor", "TransactionProcessor"),
    ],
)
@pytest.mark.parametrize("entry", ["coprocessor$1", "COPROCESSOR$12"])
def test_cdap_observer_is_reported_with_the_removal_command(java_class: str, name: str, entry: str) -> None:
    value = f"hdfs:///cdap/lib/coprocessor.jar|{java_class}|1073741823|"
    [finding] = observers(TABLE, {"SPLIT_POLICY": "…", entry: value})
    assert finding.startswith(f"{TABLE} still has CDAP's observer {name}, ")
    assert finding.endswith(f"alter '{TABLE}', METHOD => 'table_att_unset', NAME => '{entry}'")


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("coprocessor$1", "|org.apache.hadoop.hbase.security.access.AccessController|1|"),
        ("coprocessor$1", "|com.example.co.cask.Observer|1|"),
        ("coprocessor$1", "co.cask.not.a.class"),
        ("coprocessor$1", ""),
        ("coprocessor", f"|co.cask.{PACKAGE}.hbase11.MessageTableRegionObserver|1|"),
        ("cdap.version", "|co.cask.cdap|"),
    ],
)
def test_attribute_without_cdap_observer_is_not_reported(entry: str, value: str) -> None:
    assert list(observers(TABLE, {entry: value})) == []


def test_two_cdap_observers_are_both_reported() -> None:
    value = "|co.cask.cdap.Some|1|"
    assert (
        len(list(observers(TABLE, {"coprocessor$1": value, "coprocessor$2": value, "coprocessor$3": "|a.B|1|"}))) == 2
    )
