"""Statistics of a store as a person reads them (``janitor spark stats``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from janitor.cli import render
from janitor.law.policy import Rule
from janitor.report import Report

if TYPE_CHECKING:
    from janitor.spark.stats import GenerationStats


def show(found: list[GenerationStats], plans: list[Report] | None, now_ms: int) -> None:
    """Statistics as a person reads them.

    Args:
        plans: what a run would take now, and what by another policy; None without one.
    """
    out = render.console()
    if not found:
        out.print("nothing lies in this store")
        return
    columns = ["topic", "gen", "messages", "payloads", "bytes", "oldest", "newest", "overdue", "orphans", "missing"]
    columns += ["blocked since"] if plans is None else ["due now", "then", "difference", "of it held"]
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
            *([_age(one.to_json()["blocking_since_ms"], now_ms)] if plans is None else _compared(one, *plans)),
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


def _compared(one: GenerationStats, now: Report, then: Report) -> list[str]:
    """What two plans say of a generation."""
    due, due_then, held_then = (
        sum(
            entry.rows
            for key, entry in report.entries.items()
            if (key.topic, key.generation) == (one.topic, one.generation)
            and key.rule is not Rule.INVALID_TRANSACTION
            and not (held and report.counts_as_done(key.held))
        )
        for report, held in ((now, False), (then, False), (then, True))
    )
    return [f"{due:,}", f"{due_then:,}", f"{due_then - due:+,}", f"{held_then:,}"]


def _age(ms: int | None, now_ms: int) -> str:
    return "" if ms is None else render.duration(now_ms - ms)
