"""What settings make HBase's tables cheap to sweep, beside those they have: pure, a table of rules.

A sweep reads keys, deletes rows and changes single cells. Its deletes are marks: space comes back, and later scans get
fast again, only when HBase rewrites a region. Most of the advice is about that; ``docs/hbase.md`` says it at length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tms_core.tables.hbase_schema import SPLIT_POLICY

_DAY_MS, _HOUR_MS = 86_400_000, 3_600_000
#: What the HBase shell writes for no end of life.
FOREVER = "FOREVER"


@dataclass(frozen=True)
class TableSettings:
    """A table as it is.

    Attributes:
        name: its full name.
        starts: where its regions begin.
        buckets: how many salts its rows have; None: they have none, or it is not known.
        settings: attributes of the table and settings of its family, by their names in the HBase shell.
        complete: whether what is not among them has HBase's default; else it could not be read.
    """

    name: str
    starts: Sequence[bytes]
    buckets: int | None
    settings: Mapping[str, str]
    complete: bool

    @property
    def missing_starts(self) -> list[bytes]:
        """Salts at which no region begins."""
        return [start for salt in range(1, self.buckets or 1) if (start := bytes([salt])) not in self.starts]


class Rule(NamedTuple):
    """What one setting should be.

    Attributes:
        setting: its name in the HBase shell.
        default: what HBase takes where it is not set.
        fits: judges a value.
        advised: a value that fits.
        why: what it is good for.
    """

    setting: str
    default: str
    fits: Callable[[str], bool]
    advised: str
    why: str


class Advice(NamedTuple):
    """One setting of one table.

    Attributes:
        setting: its name, or ``regions``.
        now: what it is; None: not known.
        advised: what it should be.
        fits: whether it is good as it is; None: not known.
        why: what it is good for.
    """

    setting: str
    now: str | None
    advised: str
    fits: bool | None
    why: str


def _is(wanted: str) -> Callable[[str], bool]:
    return lambda value: value.upper() == wanted.upper()


def _at_most(limit: int) -> Callable[[str], bool]:
    return lambda value: value.isdigit() and 0 < int(value) <= limit


def _exactly(setting: str, value: str, why: str) -> Rule:
    """A rule whose only good value is HBase's default."""
    return Rule(setting, value, _is(value), value, why)


#: Of a table's attributes.
TABLE_RULES = (
    Rule(
        "hbase.hregion.majorcompaction",
        str(7 * _DAY_MS),
        _at_most(_DAY_MS),
        str(_DAY_MS),
        "a compaction that is asked for frees space only where a region's oldest file is older than this",
    ),
    Rule(
        "hbase.regionserver.optionalcacheflushinterval",
        str(_HOUR_MS),
        _at_most(_HOUR_MS),
        str(_HOUR_MS),
        "deletes free nothing as long as they are in memory; after an hour they are taken to be in files",
    ),
    Rule("SPLIT_POLICY", "", _is(SPLIT_POLICY), SPLIT_POLICY, "as CDAP: a region stays a bucket, and is swept as one"),
    _exactly("NORMALIZATION_ENABLED", "false", "the normalizer merges regions that a sweep has emptied"),
    _exactly("READONLY", "false", "nothing can be deleted or inverted otherwise"),
)
#: Of the column family.
FAMILY_RULES = (
    _exactly("VERSIONS", "1", "with more, the pointers from before an inversion stay on disk"),
    _exactly("MIN_VERSIONS", "0", "with more, and a TTL, HBase keeps what should go"),
    _exactly("TTL", FOREVER, "HBase's own knows neither topics nor holds, pauses and archives"),
    _exactly("KEEP_DELETED_CELLS", "FALSE", "deleted rows would stay on disk"),
    Rule("BLOOMFILTER", "NONE", _is("ROW"), "ROW", "an inversion reads single rows, without it from every file"),
    Rule("BLOCKCACHE", "true", _is("true"), "true", "an inversion reads several rows of a block, one by one"),
    Rule(
        "DATA_BLOCK_ENCODING",
        "NONE",
        lambda value: value.upper() != "NONE",
        "FAST_DIFF",
        "keys are long and alike: up to a third less on disk and in memory, at the same speed",
    ),
    Rule(
        "COMPRESSION",
        "NONE",
        lambda value: value.upper() != "NONE",
        "SNAPPY",
        "scans read less, and compactions write less; the region servers need its library",
    ),
)


def advise(table: TableSettings) -> list[Advice]:
    """All there is to say of a table, whether it has to be changed or not.

    Args:
        table: as it is.
    """
    found = [_judged(table, rule) for rule in (*TABLE_RULES, *FAMILY_RULES)]
    if table.buckets is not None:
        regions, missing = len(table.starts), len(table.missing_starts)
        why = "one for each bucket at least, so that buckets are swept, and compacted, by themselves"
        found.append(Advice("regions", str(regions), str(regions + missing), not missing, why))
    return found


def shell_lines(table: TableSettings) -> list[str]:
    """What the HBase shell takes to follow the advice; nothing of what is not known.

    Splits come first: with CDAP's split policy HBase makes none.

    Args:
        table: as it is.
    """
    wrong = {advice.setting: advice.advised for advice in advise(table) if advice.fits is False}
    lines = [f"split '{table.name}', \"\\x{start.hex()}\"" for start in table.missing_starts]
    parts = []
    if family := [f"{rule.setting} => '{wrong[rule.setting]}'" for rule in FAMILY_RULES if rule.setting in wrong]:
        parts.append(f"{{NAME => 'd', {', '.join(family)}}}")
    attributes = {rule.setting: wrong[rule.setting] for rule in TABLE_RULES if rule.setting in wrong}
    # What has a dot is the region servers', set for this table alone.
    for word, dotted in (("CONFIGURATION", True), ("METADATA", False)):
        if pairs := [f"'{name}' => '{value}'" for name, value in attributes.items() if ("." in name) is dotted]:
            parts.append(f"{word} => {{{', '.join(pairs)}}}")
    return [*lines, f"alter '{table.name}', {', '.join(parts)}"] if parts else lines


def _judged(table: TableSettings, rule: Rule) -> Advice:
    now = table.settings.get(rule.setting, rule.default if table.complete else None)
    return Advice(rule.setting, now, rule.advised, None if now is None else rule.fits(now), rule.why)
