"""Results as text for operators; JSON is printed by :func:`print_json` alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from janitor.report import Report
from janitor.rules.policy import Hold, Reason, Rule
from janitor.state.records import MessagesLeft, StoreBytes
from janitor.state.values import pack
from tms_core.errors import code_of_guard
from tms_core.logs import printable
from tms_core.logs.printable import duration

_RULES = {
    Rule.EXPIRED: "expired",
    Rule.OLD_GENERATION: "old generation",
    Rule.PROCESSED: "processed",
    Rule.INVALID_TRANSACTION: "invert",
}
_REASONS: Mapping[str, str] = {
    Reason.UNKNOWN_TOPIC: "of unknown topics",
    Reason.NEWER_GENERATION: "of newer generations",
    Reason.UNRECOGNIZED: "unrecognized",
    Reason.UNDECIDED: "of undecided transactions",
    Reason.REFERENCED: "referenced by a message",
    Reason.HELD: "held",
}
_HOLDS = {
    Hold.FIRST_CONTACT: "until adopted",
    Hold.FRONTIER: "until approved",
    Hold.CONSUMER: "for a consumer",
    Hold.TRANSACTION: "for a transaction",
    Hold.PROTECTED: "protected",
    Hold.PAUSED: "paused",
    Hold.QUARANTINED: "quarantined",
}


#: The width of the label on the left of a line, in columns.
_LABEL_WIDTH = 13

#: The maximum number of columns of a table with long cells; wider tables have short cells.
FEW_COLUMNS = 3

#: The width of a table in a file or a pipe, where lines are not folded.
PIPE_COLUMNS = 10_000


class _PlainConsole(Console):
    """A console that shows control characters of stored data instead of executing them."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(_printable(content) for content in objects), **options)


class _PlainTable(Table):
    """A table that shows control characters in its cells."""

    def add_row(self, *renderables: Any, **options: Any) -> None:
        super().add_row(*(_printable(content) for content in renderables), **options)


def _printable(content: Any) -> Any:
    """Return a line or a cell without control characters; other objects have printable parts already."""
    if isinstance(content, str):
        return printable.printable(content)
    if isinstance(content, Text) and not content.plain.isprintable():
        return Text(printable.printable(content.plain), style=content.style)
    return content


def console() -> Console:
    """Return standard output; with colors and folded tables on a terminal only, without colors with ``NO_COLOR``.

    Brackets and colons are not markup, because patterns and paths contain them. Lines are not folded, so that users can
    copy commands.
    """
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return _PlainConsole(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True, width=width)


def print_table(table: Table) -> None:
    """Print a table; on a narrow terminal, print its rows as paragraphs, so that no cell is cut."""
    out = console()
    natural = out.measure(table, options=out.options.update(max_width=PIPE_COLUMNS)).maximum
    if len(table.columns) <= FEW_COLUMNS or natural <= out.width:
        with out.capture() as printed:
            out.print(table, soft_wrap=False)
        out.file.writelines(f"{row.rstrip()}\n" for row in printed.get().splitlines())
        return
    headers = [str(column.header) for column in table.columns]
    for first, *rest in zip(*(column.cells for column in table.columns), strict=True):
        named = [f"{header} {cell}" for header, cell in zip(headers[1:], rest, strict=True) if cell]
        out.print(first)
        out.print(Padding(", ".join(named), (0, 0, 0, 2)), soft_wrap=False)


def print_json(value: object) -> None:
    """Print a value as JSON on standard output."""
    sys.stdout.write(json.dumps(pack(value), indent=1) + "\n")


def print_report(
    report: Report, next_step: str = "", complete: Callable[[str], str] = str, *, summary: bool = False
) -> None:
    """Print the report of a plan or a run: deleted rows by rule, kept rows by reason, notes of guards.

    Args:
        summary: whether to print one line for each topic, largest first, instead of each generation, table and rule.
        complete: adds the options of this store to commands in notes of guards.
    """
    out = console()
    out.print(_summary(report))
    if report.topics:
        print_table(_by_topic(report) if summary else _by_entry(report))
    if report.topics_omitted:
        out.print(f"and {report.topics_omitted:,} smaller entries, which were not recorded")
    out.print(_totals(report))
    for line in [*_gain_lines(report), *_remaining_lines(report), *_earlier_holds(report)]:
        out.print(line)
    if report.boundary is not None:
        out.print(f"proven clean up to transaction {report.boundary} ({moment(report.boundary // 10**6)})")
    if report.truncated:
        out.print(f"{report.truncated:,} transactions removed from the invalid list")
    for note in report.guards:
        out.print(guard_line(note.guard, complete(note.message), tripped=note.tripped))
    for error in report.errors:
        out.print(Text(f"failed: {error}", style="bold red"))
    if next_step:
        print_next(next_step, style="bold")


def guard_line(guard: str, message: str, *, tripped: bool) -> Text:
    """Return the note of a guard, with the error code if the guard blocked the run."""
    # Print the code before the message, which often has a command at its end.
    name = f"{guard} [{code_of_guard(guard)}]" if tripped else guard
    return Text(f"{name}: {message}", style="bold red" if tripped else "yellow")


def print_next(steps: str, style: str = "") -> None:
    """Print the next command, followed by remarks."""
    for step in f"next: {steps}".split("\n"):
        console().print(Text(step, style=style))


def grid(columns: Sequence[str], right: Sequence[int] = ()) -> Table:
    """Return an empty table; ``right`` has the numbers of right-aligned columns."""
    table = _PlainTable(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        # In a table with many columns, only the first column is folded.
        fits = number > 0 and len(columns) > FEW_COLUMNS
        table.add_column(
            printable.printable(column), justify="right" if number in right else "left", overflow="fold", no_wrap=fits
        )
    return table


def styled(text: str, style: str) -> Text:
    """Return text with a style."""
    return Text(text, style=style)


#: A time in UTC.
moment = printable.moment


def size(count: int) -> str:
    """Return a number of bytes as text, rounded."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 10 else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def gain(found: StoreBytes) -> str:
    """Return the change of the store's size by a run, as text; empty if unknown."""
    if found.before is None or found.after is None:
        return ""
    return f"the store: {size(found.before)} before, {size(found.after)} after"


def messages(mode: str, found: MessagesLeft, began_ms: int | None = None) -> str:
    """Return the number of deleted messages and of all messages as text; empty if unknown.

    Args:
        began_ms: the start of the run; None to omit the age of the count.
    """
    if found.before is None or found.left is None or found.counted_ms is None:
        return ""
    verb = "would be deleted" if mode == "plan" else "deleted"
    age = "" if began_ms is None else f" (counted {duration(began_ms - found.counted_ms, rough=True)} before)"
    return f"{found.before - found.left:,} of about {found.before:,} {verb}, about {found.left:,} left{age}"


def on_disk(present: int | None) -> str:
    """Return the size of the store as text, to follow the size of due rows in a plan."""
    return "" if present is None else f", of {size(present)} on disk"


def age(ms: int | None, report: Report) -> str:
    """Return the age at the time of the report; with ``in`` for a future time."""
    if ms is None:
        return ""
    past_ms = report.effective_now_ms - ms
    return duration(past_ms, rough=True) if past_ms >= 0 else f"in {duration(past_ms, rough=True)}"


def when(ms: int, now_ms: int) -> str:
    """Return a time, and its distance from now."""
    away = duration(now_ms - ms, rough=True)
    return f"{moment(ms)} ({f'{away} ago' if ms <= now_ms else f'in {away}'})"


def line(name: str, *parts: str, style: str = "") -> Text:
    """Return a line with a label on the left."""
    text = Text(f"{name:<{_LABEL_WIDTH}}", style="bold")
    return text.append(Text("; ".join(part for part in parts if part), style=style))


def _summary(report: Report) -> Text:
    title = "plan" if report.mode == "plan" else "run"
    snapshot = "no transaction snapshot"
    if report.snapshot is not None:
        age_ms = report.effective_now_ms - report.snapshot.timestamp_ms
        snapshot = f"{report.snapshot.source}, {duration(age_ms)} {'old' if age_ms > -1000 else 'newer'}"
    return Text(f"{title} {report.id} as of {moment(report.effective_now_ms)}, {snapshot}")


def _verb(report: Report) -> str:
    return "would be " if report.mode == "plan" else ""


def _by_entry(report: Report) -> Table:
    """Return due and held rows by topic, generation, table and rule."""
    table = grid(["topic", "gen", "table", "rule", "rows", "bytes", "oldest", "newest", "held"], right=(1, 4, 5))
    for entry in report.topics:
        oldest, newest = age(entry.oldest_ms, report), age(entry.newest_ms, report)
        hold = _HOLDS[entry.held] if entry.held else ""
        subject = (str(entry.topic), str(entry.generation), entry.table, _RULES[entry.rule])
        table.add_row(*subject, f"{entry.rows:,}", size(entry.bytes), oldest, newest, hold)
    return table


def _by_topic(report: Report) -> Table:
    """Return due and held rows by topic, sorted by bytes."""
    found: dict[str, list[int]] = {}
    for entry in report.topics:
        row = found.setdefault(str(entry.topic), [0, 0, 0])
        row[0] += entry.bytes
        row[1 if entry.counts_as_done(report.mode) else 2] += entry.rows
    table = grid(["topic", "bytes", "rows", "held"], right=(1, 2, 3))
    for topic, (size_bytes, rows, held_rows) in sorted(found.items(), key=lambda item: (-item[1][0], item[0])):
        table.add_row(topic, size(size_bytes), f"{rows:,}", f"{held_rows:,}" if held_rows else "")
    return table


def _totals(report: Report) -> Text:
    verb, totals = _verb(report), report.totals
    parts = [
        f"{totals.expired:,} expired",
        *([f"{totals.processed:,} processed"] if totals.processed else []),
        f"{totals.old_generation:,} of old generations {verb}deleted",
        f"{totals.invalid_transaction:,} of invalid transactions {verb}inverted",
    ]
    return Text(f"rows: {', '.join(parts)}", style="bold")


def _gain_lines(report: Report) -> Iterator[str]:
    """Yield the number of deleted messages, of all messages, and the freed space if it is known."""
    if progress := messages(report.mode, report.messages, report.started_ms):
        yield f"messages: {progress}"
    if freed := report.deleted_bytes:
        about, of = ("about ", on_disk(report.store_bytes.before)) if report.mode == "plan" else ("", "")
        yield f"size: {about}{size(freed)} of rows {_verb(report)}deleted{of}"
        if gained := gain(report.store_bytes):
            yield gained


def _remaining_lines(report: Report) -> Iterator[str]:
    """Yield the line about kept rows, if there are any."""
    counts = ((_REASONS[reason], rows) for reason, rows in report.totals.kept.items() if rows)
    if reasons := ", ".join(f"{rows:,} {words}" for words, rows in counts):
        yield f"kept on purpose: {reasons}"


def _earlier_holds(report: Report) -> Iterator[str]:
    for entry in report.held_before.topics if report.held_before else ():
        hold = _HOLDS[entry.held] if entry.held else ""
        why = f"{entry.table}, {_RULES[entry.rule]}, {hold}"
        yield f"still held, counted by an earlier run: {entry.rows:,} rows of {entry.topic} ({why})"
