"""Values on the control socket: each is returned unchanged, and invalid input is rejected."""

from __future__ import annotations

import json
import typing
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from janitor.boundary import Boundary, Limit
from janitor.control.api import OperatorCommands, ReadEngine, methods
from janitor.inspect.answer import Why
from janitor.report import Report
from janitor.rules.policy import Rule
from janitor.run import plan_file as plan
from janitor.run.plan_file import PlanFile
from janitor.run.queries import PlanResult
from janitor.state import values
from janitor.state.base import ProvenBoundary
from tests.builders import DAY, HOUR, NOW_MS, janitor, pointer, topic
from tms_core.rowkey import MessageId
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicId

ORDERS = TopicId("default", "orders")


class Point(NamedTuple):
    x: int
    y: float = 0.5


@dataclass(frozen=True)
class Shape:
    name: str
    points: tuple[Point, ...] = ()


def encode_and_decode(kind: Any, value: Any) -> Any:
    """Return the value after it was packed, encoded, decoded and unpacked."""
    return values.unpack(kind, json.loads(json.dumps(values.pack(value))))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (None | int, None),
        (int, 2**63 - 1),
        (float, 0.1),
        (bool, True),
        (str, "\udc80 ö"),
        (bytes, b"\x00\xff"),
        (Rule, Rule.EXPIRED),
        (Shape, Shape("a", (Point(1), Point(-2, 1e300)))),
        (tuple[int, str], (1, "a")),
        (frozenset[int], frozenset({1, 2})),
        (dict[str, list[bytes]], {"a": [b"b"]}),
        (dict[bytes, int], {b"a": 1, b"": 2}),
        (dict[bytes, int], {}),
        (dict[TopicId, Rule], {ORDERS: Rule.EXPIRED}),
        (
            tuple[ProvenBoundary | None, Boundary],
            (ProvenBoundary(5, 6, "r"), Boundary(5, (Limit(5, "why"),), ("none",))),
        ),
    ],
)
def test_value_reads_back_with_its_type(kind: Any, value: Any) -> None:
    found = encode_and_decode(kind, value)
    assert (found, type(found)) == (value, type(value))


def test_planned_and_applied_values_are_returned_unchanged() -> None:
    kit = janitor(MemoryStore())
    orders = topic(kit.store, "default:orders", ttl_seconds=3600)
    invalid = pointer(NOW_MS - 10 * HOUR)
    orders.plain(NOW_MS - DAY, NOW_MS).tx(invalid, NOW_MS).stored(pointer(NOW_MS - DAY), NOW_MS - DAY)
    kit.snapshots.invalid = [invalid]
    kit.engine.adopt()
    planned = kit.engine.plan()
    found: PlanResult = encode_and_decode(PlanResult, planned)
    assert found == planned
    assert len(found.report.topics) == 3
    wanted = plan.parse(planned.document, "plan")
    assert encode_and_decode(PlanFile, wanted) == wanted
    done = kit.engine.apply(wanted)
    assert encode_and_decode(Report, done) == done
    answer = kit.engine.why(ORDERS, MessageId(NOW_MS - DAY, 0))
    assert encode_and_decode(Why, answer) == answer
    assert answer.missing[0].taken


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, "1"),
        (int, True),
        (int, 1.0),
        (str, 1),
        (str, None),
        (bool, 1),
        (bytes, "zz"),
        (bytes, 5),
        (Rule, "no rule"),
        (Shape, []),
        (Shape, {"points": []}),
        (Shape, {"name": "a", "points": [{"y": 1.0}]}),
        (tuple[int, ...], {}),
        (tuple[int, str], [1]),
        (list[int], "12"),
        (dict[str, int], 5),
        (typing.Literal["a", "b"], "c"),
        (int | str, 1),
        (object, 1),
    ],
)
def test_unpack_of_an_unexpected_value_raises(kind: Any, value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        values.unpack(kind, value)


def test_pack_of_an_unknown_class_raises() -> None:
    with pytest.raises(TypeError, match=r"^object .*JSON"):
        values.pack([object()])


def test_methods_of_the_socket_have_a_form_on_the_wire() -> None:
    for protocol in (ReadEngine, OperatorCommands):
        for name in methods(protocol):
            for kind in types_within(list(typing.get_type_hints(getattr(protocol, name)).values())):
                assert has_form(kind), f"{name}: {kind}"


def types_within(kinds: list[Any]) -> set[Any]:
    """Return these types and all types of their fields."""
    found: set[Any] = set()
    while kinds:
        kind = kinds.pop()
        if kind not in found and kind is not Any and kind is not ...:
            found.add(kind)
            if typing.get_origin(kind) is not typing.Literal:
                kinds += typing.get_args(kind)
            if hasattr(kind, "_fields") or hasattr(kind, "__dataclass_fields__"):
                kinds += typing.get_type_hints(kind).values()
    return found


def has_form(kind: Any) -> bool:
    try:
        values.unpack(kind, None)
    except (ValueError, TypeError) as error:
        return "no form" not in str(error)
    return True
