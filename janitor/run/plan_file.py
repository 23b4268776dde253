"""Plan files: dry runs that operators can inspect, keep and apply.

``apply`` must delete only rows of the file. Therefore the file has the ranges and pointers, their basis (store,
generation, TTL, settings) and a checksum. If a part of the basis has changed, ``apply`` rejects the plan and names the
change. A what-if plan, for another time or for other TTLs, cannot be applied.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from janitor.report import DataTable, Entry, Report
from janitor.rules.policy import Frontier, Hold, Rule
from janitor.rules.ranges import Span, intersect, message_spans, payload_spans
from janitor.state.values import pack
from janitor.sweep.outcome import Outcome
from janitor.sweep.run import PlanLimits, Run, Terms, TopicWork, parse_or_none
from tms_core.errors import ConfigurationError, PlanRefused, StoreError
from tms_core.rowkey import LONG_MAX, Cutoff, generation_prefix
from tms_core.tables.base import KeyRange, MetadataReads, Reads
from tms_core.topic import INT_MAX, TopicId, TopicMetadata, encode_properties

FORMAT = 1
#: The maximum size of a file in bytes: room for millions of transactions.
_MAX_BYTES = 512 << 20

#: The holds of entries that ``apply`` deletes; entries with other holds are for information.
APPLICABLE = (None, str(Hold.FIRST_CONTACT))


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan from a file with a correct checksum.

    Attributes:
        effective_now_ms: the time at which the plan evaluates the rules.
        limits: the only ranges in which ``apply`` may delete, and the only write pointers that it may invert.
    """

    id: str
    store_id: str
    effective_now_ms: int
    terms: Mapping[str, Any]
    topics: Mapping[TopicId, tuple[int, int]]
    limits: PlanLimits

    def check(self, store_id: str, terms: Terms, run: Run) -> None:
        """Compare the basis of the plan with the present store and settings.

        Raises:
            PlanRefused: the store, a setting, or a topic's generation, TTL or protection has changed.
        """
        if store_id != self.store_id:
            raise _refusal("it was made for another store, or for this store before the store was copied or restored")
        present = describe_terms(terms)
        changed = sorted(name for name in present if self.terms.get(name) != present[name])
        if changed:
            raise _refusal(f"these settings have changed since the plan was made: {', '.join(changed)}")
        for topic, (generation, ttl_seconds) in self.topics.items():
            self._check_topic(topic, generation, ttl_seconds, run)

    def _check_topic(self, topic: TopicId, generation: int, ttl_seconds: int, run: Run) -> None:
        work = run.topics.get(topic.prefix)
        if work is None:
            raise _refusal(f"topic {topic} no longer has readable metadata")
        if work.topic.generation != generation:
            raise _refusal(f"topic {topic} has generation {work.topic.generation}, the plan has {generation}")
        if work.topic.ttl_seconds != ttl_seconds:
            raise _refusal(f"topic {topic} has a ttl of {work.topic.ttl_seconds} s, the plan has {ttl_seconds} s")


def document(
    report: Report, outcome: Outcome, run: Run, *, store_id: str, digest: str, what_if: bool
) -> dict[str, Any]:
    """Return the contents of a plan file."""
    found: dict[str, Any] = pack(report)
    for item, entry in zip(found["topics"], report.topics, strict=True):
        work = run.topics.get(entry.topic.prefix)
        item["metadata"] = work and {"generation": work.topic.generation, "ttl_seconds": work.topic.ttl_seconds}
        ranges = [*_ranges(entry, work), *_early(entry, outcome)]
        item["ranges"] = [{"start": start.hex(), "stop": stop.hex()} for start, stop in ranges]
        item["frontier"] = work and _frontier_values(work.frontier)
        inverted = entry.rule is Rule.INVALID_TRANSACTION
        item["pointers"] = [str(p) for p in sorted(outcome.pointers.get(entry.topic, ()))] if inverted else []
    found["format"] = FORMAT
    found["store_id"] = store_id
    found["config_digest"] = digest
    found["terms"] = describe_terms(run.terms)
    found["what_if"] = what_if
    found["sha256"] = checksum(found)
    return found


def save(path: Path, contents: Mapping[str, Any]) -> None:
    """Write a plan file that only its owner may read and change, because ``apply`` executes it.

    Raises:
        StoreError: the file could not be written.
    """
    try:
        with open(path, "w", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                os.fchmod(file.fileno(), 0o600)  # an existing file would keep its mode
            file.write(json.dumps(contents, indent=1) + "\n")
    except OSError as error:
        raise StoreError(
            f"the plan could not be written to {path}: {error.strerror}.",
            "Free space there, or choose another --out FILE.",
        ) from error


def load(path: Path) -> Any:
    """Return the unchecked contents of a plan file.

    Raises:
        ConfigurationError: the file cannot be read, is too large, or is not JSON.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ConfigurationError(
                f"{path} has more than {_MAX_BYTES} bytes, the limit of a plan file.",
                "Make plans of fewer topics: janitor plan --topic PATTERN --out FILE",
            )
        return json.loads(data.decode())
    except OSError as error:
        raise ConfigurationError(
            f"cannot read {path}: {error.strerror}.", "Name a plan file, or make one: janitor plan --out FILE"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _not_a_plan(str(path)) from error


def parse(contents: Any, name: str) -> PlanFile:
    """Check the contents of a plan file; return the plan for ``apply``.

    Args:
        name: the name of the file, for messages.

    Raises:
        ConfigurationError: the contents are not a plan, are damaged, or are a what-if plan.
    """
    try:
        if contents["sha256"] != checksum(contents):
            raise ConfigurationError(f"{name} was changed after it was made.", "Make a new plan: janitor plan --out")
        if contents["what_if"]:
            raise ConfigurationError(
                f"{name} is a what-if plan, made for another time or for other ttls.",
                "Make a plan without --at and --what-if: janitor plan --out FILE",
            )
        return _parse(contents)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _not_a_plan(name) from error


def read(path: Path) -> PlanFile:
    """Read a plan file for ``apply``; raise the errors of :func:`load` and :func:`parse`."""
    return parse(load(path), str(path))


def _not_a_plan(name: str) -> ConfigurationError:
    return ConfigurationError(f"{name} is not a plan file.", "Make a plan: janitor plan --out FILE")


#: The settings that affect deletions, except settings with another form in JSON.
_DECISIVE = ("hold_seconds", "lifetime_known", "snapshot_interval_seconds", "consumer_hold_seconds")


def describe_terms(terms: Terms) -> dict[str, Any]:
    """Return the settings of a plan, by name, as JSON values."""
    found = {name: getattr(terms, name) for name in _DECISIVE}
    return {**found, "protect": list(terms.protect), "lifetime": list(terms.lifetime)}


def checksum(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the document's canonical JSON, without the checksum itself."""
    rest = {name: value for name, value in document.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode("utf-8")).hexdigest()


def _parse(document: Mapping[str, Any]) -> PlanFile:
    if document["format"] != FORMAT:
        raise ValueError("format")
    ranges: dict[tuple[DataTable, TopicId], set[KeyRange]] = {}
    topics: dict[TopicId, tuple[int, int]] = {}
    pointers: dict[TopicId, set[int]] = {}
    frontiers: dict[TopicId, Frontier] = {}
    for item in document["topics"]:
        if item["held"] not in APPLICABLE:
            continue
        topic = TopicId.parse(f"{item['tms_namespace']}:{item['topic']}")
        if item["metadata"] is not None:
            topics[topic] = (_long(item["metadata"]["generation"]), _long(item["metadata"]["ttl_seconds"]))
            frontiers[topic] = _frontier(_long(document["effective_now_ms"]), **item["frontier"])
        found = {KeyRange(bytes.fromhex(r["start"]), bytes.fromhex(r["stop"])) for r in item["ranges"]}
        ranges.setdefault((item["table"], topic), set()).update(found)
        pointers.setdefault(topic, set()).update(_long(pointer) for pointer in item["pointers"])
    return PlanFile(
        id=_text(document["id"]),
        store_id=_text(document["store_id"]),
        effective_now_ms=_long(document["effective_now_ms"]),
        terms={**document["terms"]},
        topics=topics,
        limits=PlanLimits(
            {key: tuple(sorted(found)) for key, found in ranges.items()},
            {topic: frozenset(found) for topic, found in pointers.items()},
            frontiers,
        ),
    )


def _long(value: int | str) -> int:
    """Return a 64-bit number.

    Raises:
        ValueError: it is not a number, or out of range.
    """
    number = int(value)
    if not -LONG_MAX <= number <= LONG_MAX:
        raise ValueError("a number")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a text")
    return value


def _frontier_values(frontier: Frontier) -> dict[str, Any]:
    """Return a frontier as JSON values; numbers of more than 53 bits are strings."""
    return {
        "generation": frontier.generation,
        "cutoff_ms": frontier.cutoff.ms,
        "hold": frontier.hold,
        "processed": str(frontier.processed),
        "decided_ms": str(frontier.decided_ms),
    }


def _frontier(
    now_ms: int, generation: int, cutoff_ms: int, hold: str | None, processed: str, decided_ms: str
) -> Frontier:
    cutoff, held = Cutoff(_long(cutoff_ms)), None if hold is None else Hold(hold)
    return Frontier(now_ms, cutoff, cutoff, _long(generation), held, _long(processed), _long(decided_ms))


def _ranges(entry: Entry, work: TopicWork | None) -> list[tuple[bytes, bytes]]:
    """Return the ranges of one generation in which the entry's rule deletes rows."""
    if work is None:
        return []
    prefix, generation = entry.topic.prefix, entry.generation
    own = KeyRange(generation_prefix(prefix, generation), generation_prefix(prefix, generation + 1))
    spans: list[Span]
    rule = entry.rule
    if entry.table == "message":
        spans = message_spans(work.topic, work.frontier)
    else:
        spans = payload_spans(work.topic, work.frontier, None)
        # The span of expired rows includes processed rows; the time of each row decides.
        rule = Rule.EXPIRED if rule is Rule.PROCESSED else rule
    is_held = entry.held not in (None, Hold.FIRST_CONTACT)
    matches = [span for span in spans if span.rule is rule and (span.held == is_held or span.by_row)]
    return [(span.start, span.stop) for span in intersect(matches, [own])]


def _early(entry: Entry, outcome: Outcome) -> list[tuple[bytes, bytes]]:
    """Return the range of the entry's messages with their own TTLs; ``apply`` keeps rows in it that are not due."""
    ends = outcome.early.get((entry.topic, entry.generation))
    if ends is None or entry.table != "message" or entry.rule is not Rule.EXPIRED:
        return []
    return [(ends[0], ends[1] + b"\x00")]


def _refusal(reason: str) -> PlanRefused:
    return PlanRefused(f"the plan was not applied: {reason}.", "Make a new plan: janitor plan --out FILE")


# -- other ttls --------------------------------------------------------------------------------------------------------


_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_AMOUNTS = re.compile(r"(?:\d{1,10}[smhd])+")
_AMOUNT = re.compile(r"(\d+)([smhd])")
_EXAMPLE = "Write ttl=3d,topic=default:* (units s, m, h and d); several policies are separated by semicolons."


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A hypothetical TTL of topics.

    Attributes:
        ttl_seconds: the hypothetical TTL.
        patterns: shell patterns of the topics with that TTL.
    """

    ttl_seconds: int
    patterns: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> tuple[WhatIf, ...]:
        """Parse hypothetical TTLs; if several apply to a topic, the last one counts.

        Raises:
            ConfigurationError: the text cannot be parsed; the hint has an example.
        """
        return tuple(cls._parse_one(one) for one in text.split(";") if one.strip())

    @classmethod
    def _parse_one(cls, text: str) -> WhatIf:
        pairs = [part.strip().partition("=") for part in text.split(",")]
        ttls = [value for name, _, value in pairs if name == "ttl"]
        patterns = tuple(value for name, _, value in pairs if name == "topic")
        well_named = all(name in ("ttl", "topic") for name, _, _ in pairs)
        well_formed = len(ttls) == 1 and all(pattern.count(":") == 1 for pattern in patterns)
        if not (well_named and well_formed and _AMOUNTS.fullmatch(ttls[0])):
            raise ConfigurationError(f"{text.strip()!r} is not a ttl for a what-if plan.", _EXAMPLE)
        seconds = sum(int(number) * _UNIT_SECONDS[unit] for number, unit in _AMOUNT.findall(ttls[0]))
        if not 1 <= seconds <= INT_MAX:
            raise ConfigurationError(
                f"A ttl of {seconds} s is out of range.", f"Choose a ttl between 1 and {INT_MAX} seconds."
            )
        return cls(seconds, patterns or ("*:*",))


def with_supposed_ttl(topic: TopicMetadata, changes: tuple[WhatIf, ...]) -> TopicMetadata:
    """Return the topic with its hypothetical TTL."""
    for change in changes:
        if topic.topic.matches(change.patterns):
            topic = replace(topic, ttl_seconds=change.ttl_seconds)
    return topic


def suppose_ttls(store: Reads, changes: tuple[WhatIf, ...]) -> Reads:
    """Return a read-only store with the hypothetical TTLs in its metadata."""
    found = copy(store)
    found.metadata = SupposedMetadata(store.metadata, changes)
    return found


class SupposedMetadata(MetadataReads):
    """A metadata table with hypothetical TTLs; rows that do not parse are unchanged."""

    def __init__(self, table: MetadataReads, changes: tuple[WhatIf, ...]) -> None:
        self._table = table
        self._changes = changes

    def rows(self) -> list[tuple[bytes, bytes]]:
        return [(key, self._suppose_ttl(key, value)) for key, value in self._table.rows()]

    def get(self, key: bytes) -> bytes | None:
        value = self._table.get(key)
        return None if value is None else self._suppose_ttl(key, value)

    def _suppose_ttl(self, key: bytes, value: bytes) -> bytes:
        topic = parse_or_none(key, value)
        if topic is None:
            return value
        changed = with_supposed_ttl(topic, self._changes)
        return value if changed == topic else encode_properties({**json.loads(value), "ttl": str(changed.ttl_seconds)})
