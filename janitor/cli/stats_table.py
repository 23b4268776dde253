"""Statistics of a store as a person reads them (``janitor spark stats``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from janitor.cli import render
from janitor.law.policy import Rule
from tms_core.logs.printable import duration

if TYPE_CHECKING:
    from janitor.spark.stats import GenerationStats


def show(found: list[GenerationStats], now_ms: int) -> None:
    """Statistics as a person reads them."""
    out = render.console()
    if not found:
        out.print("nothing lies in this store")
        return
    columns = ["topic", "gen", "messages", "payloads", "bytes", "oldest", "newest", "overdue", "orphans", "missing"]
    columns.append("blocked since")
    table = render.grid(columns, right=range(2, len(columns)))
    for one in found:
        table.add_row(
            str(one.topic),
            str(one.generation),
            f"{one.rows:,}",
            f"{one.payload_rows:,}",
            render.size(one.size_bytes),
            _age(one.oldest_ms, now_ms),
            _age(one.newest_ms, now_ms),
            f"{sum(one.overdue.values()):,}",
            f"{one.orphans:,}",
            f"{one.missing:,}",
            _age(one.to_json()["blocking_since_ms"], now_ms),
        )
    render.print_table(table)
    totals: dict[str, Any] = {
        "messages": sum(one.rows for one in found),
        "payloads": sum(one.payload_rows for one in found),
        **{str(rule): sum(one.overdue[rule] for one in found) for rule in (Rule.EXPIRED, Rule.OLD_GENERATION)},
    }
    out.print(", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in totals.items()))
    blocked = [one for one in found if one.blocking is not None]
    if blocked:
        worst = min(blocked, key=lambda one: one.blocking or 0)
        out.print(f"readers of {worst.topic} are held up longest, by transaction {worst.blocking}")


def _age(ms: int | None, now_ms: int) -> str:
    return "" if ms is None else duration(now_ms - ms)
