"""Advice on table settings: what is said of a table, and what the HBase shell is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tms_core.tables.hbase_advice import FAMILY_RULES, TABLE_RULES, Advice, TableSettings, advise, shell_lines

NEVER_SPLIT = "org.apache.hadoop.hbase.regionserver.DisabledRegionSplitPolicy"
GOOD = {
    "hbase.hregion.majorcompaction": "86400000",
    "SPLIT_POLICY": NEVER_SPLIT,
    "BLOOMFILTER": "ROW",
    "COMPRESSION": "SNAPPY",
    "DATA_BLOCK_ENCODING": "FAST_DIFF",
}
TABLE = TableSettings("ns:tms.message", [b"", b"\x01", b"\x02"], 3, GOOD, complete=True)


def of(table: TableSettings, setting: str) -> Advice:
    [found] = [advice for advice in advise(table) if advice.setting == setting]
    return found


def test_given_a_table_that_is_as_it_should_be_then_all_fits_and_nothing_is_to_be_typed() -> None:
    found = advise(TABLE)
    assert all(advice.fits for advice in found)
    assert [advice.setting for advice in found] == [
        *(rule.setting for rule in (*TABLE_RULES, *FAMILY_RULES)),
        "regions",
    ]
    assert shell_lines(TABLE) == []


@pytest.mark.parametrize("rule", [*TABLE_RULES, *FAMILY_RULES], ids=lambda rule: rule.setting)
def test_what_is_advised_fits_by_its_own_rule(rule: object) -> None:
    assert isinstance(rule, type(TABLE_RULES[0]))
    assert rule.fits(rule.advised)
    assert rule.why


@pytest.mark.parametrize(
    ("setting", "value", "fits"),
    [
        ("hbase.hregion.majorcompaction", "86400001", False),
        ("hbase.hregion.majorcompaction", "604800000", False),
        ("hbase.hregion.majorcompaction", "0", False),
        ("hbase.hregion.majorcompaction", "soon", False),
        ("hbase.hregion.majorcompaction", "3600000", True),
        ("hbase.regionserver.optionalcacheflushinterval", "0", False),
        ("hbase.regionserver.optionalcacheflushinterval", "3600001", False),
        ("SPLIT_POLICY", "org.apache.hadoop.hbase.regionserver.SteppingSplitPolicy", False),
        ("NORMALIZATION_ENABLED", "TRUE", False),
        ("READONLY", "true", False),
        ("VERSIONS", "3", False),
        ("MIN_VERSIONS", "1", False),
        ("TTL", "604800", False),
        ("KEEP_DELETED_CELLS", "TTL", False),
        ("BLOOMFILTER", "NONE", False),
        ("BLOOMFILTER", "row", True),
        ("BLOCKCACHE", "false", False),
        ("DATA_BLOCK_ENCODING", "ROW_INDEX_V1", True),
        ("DATA_BLOCK_ENCODING", "NONE", False),
        ("COMPRESSION", "NONE", False),
        ("COMPRESSION", "ZSTD", True),
    ],
)
def test_given_a_value_then_it_is_judged_and_only_it_would_be_changed(setting: str, value: str, fits: bool) -> None:
    table = replace(TABLE, settings=GOOD | {setting: value})
    assert of(table, setting)[1::2] == (value, fits)
    assert (shell_lines(table) == []) is fits
    assert all(setting in line for line in shell_lines(table))


def test_given_what_is_not_set_then_hbases_default_is_judged_where_all_was_read_and_nothing_is_elsewhere() -> None:
    bare = replace(TABLE, settings={})
    assert of(bare, "hbase.hregion.majorcompaction")[1:4] == ("604800000", "86400000", False)
    assert of(bare, "TTL")[1:4] == ("FOREVER", "FOREVER", True)
    unread = replace(bare, complete=False)
    assert of(unread, "TTL")[1:4] == (None, "FOREVER", None)
    assert shell_lines(unread) == []


def test_given_several_wrong_settings_then_one_line_sets_them_each_at_its_place() -> None:
    [line] = shell_lines(replace(TABLE, settings={"VERSIONS": "3", "READONLY": "true"}))
    assert line == (
        "alter 'ns:tms.message', {NAME => 'd', VERSIONS => '1', BLOOMFILTER => 'ROW', DATA_BLOCK_ENCODING => "
        "'FAST_DIFF', COMPRESSION => 'SNAPPY'}, CONFIGURATION => {'hbase.hregion.majorcompaction' => '86400000'}, "
        f"METADATA => {{'SPLIT_POLICY' => '{NEVER_SPLIT}', 'READONLY' => 'false'}}"
    )


def test_given_fewer_regions_than_buckets_then_the_missing_are_split_off_before_splitting_is_forbidden() -> None:
    table = replace(TABLE, starts=[b"", b"\x01\x80"], settings=GOOD | {"SPLIT_POLICY": ""})
    assert of(table, "regions")[1:4] == ("2", "4", False)
    assert shell_lines(table) == [
        "split 'ns:tms.message', \"\\x01\"",
        "split 'ns:tms.message', \"\\x02\"",
        f"alter 'ns:tms.message', METADATA => {{'SPLIT_POLICY' => '{NEVER_SPLIT}'}}",
    ]


def test_given_more_regions_than_buckets_or_no_buckets_then_no_more_are_wanted() -> None:
    assert of(replace(TABLE, starts=[*TABLE.starts, b"\x02\x80"]), "regions").fits
    unknown = replace(TABLE, buckets=None, starts=[b""])
    assert all(advice.setting != "regions" for advice in advise(unknown))
    assert shell_lines(unknown) == []
