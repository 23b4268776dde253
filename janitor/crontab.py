"""Crontab lines: when they fire, as cron itself understands them.

Schedulers written in Python differ from cron in two ways that nobody notices before the wrong night: they count
weekdays from Monday, and they want day *and* weekday to fit where cron wants one of the two. So the five fields are
read here, into plain sets of numbers, and nobody else interprets them. Times are UTC: no hour is left out or repeated.

Not taken over: names like ``@daily``, names in lists of another field, ranges that run backwards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from itertools import product
from typing import NamedTuple

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_ITEM = re.compile(r"(?:\*|(?P<first>\d+)(?:-(?P<last>\d+))?)(?:/(?P<step>\d+))?")
#: Days a month can have, January first.
_LONGEST = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


class _Field(NamedTuple):
    name: str
    least: int
    greatest: int
    names: tuple[str, ...] = ()


#: Sunday is both 0 and 7.
_FIELDS = (
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day", 1, 31),
    _Field("month", 1, 12, _MONTHS),
    _Field("weekday", 0, 7, _WEEKDAYS),
)


@dataclass(frozen=True, slots=True)
class Crontab:
    """One crontab line.

    Attributes:
        text: as it was written.
        times: the times of a day, in order.
        weekdays: Sunday is 0.
        either: one of day and weekday has to fit; else both. As in crontab(5): either, when neither begins with ``*``.
    """

    text: str
    times: tuple[time, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    either: bool

    @classmethod
    def parse(cls, text: str) -> Crontab:
        """Read five fields: minute, hour, day, month, weekday.

        Raises:
            ValueError: says which field is wrong, or that there is no such day.
        """
        parts = text.lower().split()
        if len(parts) != len(_FIELDS):
            raise ValueError("write five fields: minute hour day month weekday")
        minutes, hours, days, months, weekdays = map(_numbers, parts, _FIELDS)
        either = not parts[2].startswith("*") and not parts[4].startswith("*")
        if not either and min(days) > max(_LONGEST[month - 1] for month in months):
            raise ValueError(f"there is no day {parts[2]} in month {parts[3]}")
        times = tuple(time(hour, minute) for hour, minute in product(sorted(hours), sorted(minutes)))
        return cls(text, times, days, months, frozenset(number % 7 for number in weekdays), either)

    def after(self, moment: datetime) -> datetime:
        """The first minute it fires that is later than ``moment``, in the same time zone."""
        day, from_then = moment.date(), moment.time()
        found = next((at for at in self.times if at > from_then), None) if self._fires_on(day) else None
        while found is None:
            day += timedelta(days=1)
            found = self.times[0] if self._fires_on(day) else None
        return datetime.combine(day, found, moment.tzinfo)

    def _fires_on(self, day: date) -> bool:
        fits = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return day.month in self.months and (any(fits) if self.either else all(fits))


def _numbers(part: str, field: _Field) -> frozenset[int]:
    numbered = part
    for number, name in enumerate(field.names, start=field.least):
        numbered = re.sub(rf"\b{name}\b", str(number), numbered)
    found: set[int] = set()
    for item in numbered.split(","):
        numbers = _item(item, field)
        if not numbers:
            raise ValueError(f"{part} is not a {field.name}, {field.least} to {field.greatest}")
        found.update(numbers)
    return frozenset(found)


def _item(item: str, field: _Field) -> range:
    """The numbers one item of a list stands for; none when it is not one."""
    match = _ITEM.fullmatch(item)
    if match is None:
        return range(0)
    first = int(match["first"] or field.least)
    last = int(match["last"] or (field.greatest if match["first"] is None or match["step"] else first))
    step = int(match["step"] or 1)
    if not (field.least <= first <= last <= field.greatest and 1 <= step <= max(1, last - first)):
        return range(0)
    return range(first, last + 1, step)
