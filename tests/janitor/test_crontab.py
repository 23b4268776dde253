from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from janitor.crontab import Crontab

LIMITS = [(0, 59), (0, 23), (1, 31), (1, 12), (0, 7)]
#: A leap year, and the last days of February of one that is none.
FIRST_DAY, DAYS = datetime(2023, 1, 1, tzinfo=UTC), 3 * 365
MINUTE = timedelta(minutes=1)


# --- a slow reading of crontab(5), minute by minute ------------------------------------------------------------------


def fits(field: str, number: int, least: int, greatest: int) -> bool:
    """Whether a number is one of those that a field names."""
    for item in field.split(","):
        span, _, step = item.partition("/")
        first, _, last = span.partition("-")
        if span == "*":
            first, last = str(least), str(greatest)
        elif not last:
            last = str(greatest) if step else first
        if int(first) <= number <= int(last) and (number - int(first)) % int(step or 1) == 0:
            return True
    return False


def fires(text: str, moment: datetime) -> bool:
    """Whether a line fires in this minute."""
    minute, hour, day, month, weekday = text.split()
    if not fits(minute, moment.minute, *LIMITS[0]) or not fits(hour, moment.hour, *LIMITS[1]):
        return False
    if not fits(month, moment.month, *LIMITS[3]):
        return False
    by_day = fits(day, moment.day, *LIMITS[2])
    from_sunday = (moment.weekday() + 1) % 7
    by_weekday = fits(weekday, from_sunday, *LIMITS[4]) or (from_sunday == 0 and fits(weekday, 7, *LIMITS[4]))
    if day.startswith("*") or weekday.startswith("*"):
        return by_day and by_weekday
    return by_day or by_weekday


def slowly(text: str, start: datetime, stop: datetime) -> list[datetime]:
    """Every minute of ``[start, stop)`` in which a line fires."""
    found = []
    while start < stop:
        if fires(text, start):
            found.append(start)
        start += MINUTE
    return found


def quickly(text: str, start: datetime, stop: datetime) -> list[datetime]:
    crontab, found = Crontab.parse(text), []
    moment = crontab.after(start - timedelta(microseconds=1))
    while moment < stop:
        found.append(moment)
        moment = crontab.after(moment)
    return found


@st.composite
def items(draw: st.DrawFn, least: int, greatest: int) -> str:
    first = draw(st.integers(least, greatest))
    last = draw(st.integers(first, greatest))
    shape = draw(st.sampled_from(["*", "*/", "first", "first/", "first-last", "first-last/"]))
    begin, end = (least, greatest) if shape.startswith("*") else (first, last if "-" in shape else greatest)
    text = {"*": "*", "first": str(first), "first-last": f"{first}-{last}"}[shape.rstrip("/")]
    return f"{text}/{draw(st.integers(1, max(1, end - begin)))}" if shape.endswith("/") else text


@st.composite
def lines(draw: st.DrawFn) -> str:
    fields = []
    for least, greatest in LIMITS:
        fields.append(",".join(draw(st.lists(items(least, greatest), min_size=1, max_size=2))))
    # Often enough the months are all, or there would be nothing to compare.
    return " ".join(fields if draw(st.booleans()) else [*fields[:3], "*", fields[4]])


@settings(max_examples=40, deadline=None)
@given(lines(), st.integers(0, DAYS), st.integers(0, 24 * 60))
def test_given_any_line_and_month_when_it_fires_then_it_is_when_a_slow_reader_says(
    text: str, day: int, minute: int
) -> None:
    start = FIRST_DAY + timedelta(days=day, minutes=minute)
    stop = start + timedelta(days=7)
    try:
        Crontab.parse(text)
    except ValueError:
        assert slowly(text, start, stop) == []
        return
    assert quickly(text, start, stop) == slowly(text, start, stop)


@pytest.mark.parametrize(
    "text", ["0 0 31 * 5-7", "59 23 29 2 *", "0 12 */2 * 1", "17 3 13 * */2", "30 6 1-7 1,7 6", "0 0 * 2 7"]
)
def test_given_a_line_when_it_fires_over_three_years_then_it_is_when_a_slow_reader_says(text: str) -> None:
    stop = FIRST_DAY + timedelta(days=DAYS)
    minute, hour, *_ = text.split()
    first = FIRST_DAY + timedelta(hours=int(hour), minutes=int(minute))
    once_a_day = [first + timedelta(days=number) for number in range(DAYS)]
    assert quickly(text, FIRST_DAY, stop) == [day for day in once_a_day if fires(text, day)]


# --- what people trip over -------------------------------------------------------------------------------------------


def days(text: str, count: int) -> list[str]:
    """The next days, from Wednesday the 15th of November 2023 on."""
    crontab, moment, found = Crontab.parse(text), datetime(2023, 11, 14, 23, 59, tzinfo=UTC), []
    for _ in range(count):
        moment = crontab.after(moment)
        found.append(moment.strftime("%a %d"))
    return found


@pytest.mark.parametrize(
    ("weekdays", "expected"),
    [
        ("0", "Sun"),
        ("7", "Sun"),
        ("sun", "Sun"),
        ("1", "Mon"),
        ("5-7", "Fri Sat Sun"),
        ("MON-fri", "Wed Thu Fri Mon Tue"),
        ("*/2", "Thu Sat Sun Tue"),
        ("1-7/2", "Wed Fri Sun Mon"),
        ("5/2", "Fri Sun"),
        ("*/7", "Sun"),
    ],
)
def test_given_weekdays_when_a_line_fires_then_sunday_is_0_and_7(weekdays: str, expected: str) -> None:
    names = expected.split()
    assert [day[:3] for day in days(f"0 0 * * {weekdays}", 2 * len(names))] == names * 2


def test_given_day_and_weekday_when_both_are_restricted_then_either_fires() -> None:
    assert days("0 0 20,23 * 5", 5) == ["Fri 17", "Mon 20", "Thu 23", "Fri 24", "Fri 01"]


def test_given_day_and_weekday_when_one_begins_with_an_asterisk_then_both_have_to_fit() -> None:
    assert days("0 0 */2 * 5", 3) == ["Fri 17", "Fri 01", "Fri 15"]
    assert days("0 0 17,18,19 * */5", 2) == ["Fri 17", "Sun 19"]


def test_given_a_moment_when_asked_what_comes_after_then_it_is_strictly_later_and_on_the_minute() -> None:
    crontab, noon = Crontab.parse("0 12 * * *"), datetime(2024, 2, 28, 12, tzinfo=UTC)
    assert crontab.after(noon - timedelta(microseconds=1)) == noon
    assert crontab.after(noon) == crontab.after(noon + timedelta(seconds=1)) == noon + timedelta(days=1)


def test_given_the_29th_of_february_when_it_is_far_away_then_it_is_found() -> None:
    leap = Crontab.parse("0 0 29 2 *")
    assert leap.after(datetime(2096, 3, 1, tzinfo=UTC)) == datetime(2104, 2, 29, tzinfo=UTC)
    sunday = Crontab.parse("0 0 29 2 */7")
    assert sunday.after(datetime(2032, 3, 1, tzinfo=UTC)) == datetime(2060, 2, 29, tzinfo=UTC)


@pytest.mark.parametrize("text", ["0 0 30 2 *", "0 0 31 4,6,9,11 */2", "0 0 31 feb *"])
def test_given_a_day_that_no_month_has_when_read_then_it_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="there is no day 3"):
        Crontab.parse(text)


def test_given_a_day_that_no_month_has_when_a_weekday_would_do_as_well_then_it_is_taken() -> None:
    assert days("0 0 30 2 1", 1) == ["Mon 05"]
