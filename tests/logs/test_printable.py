"""Text of clients in logs and on terminals."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tms_core.logs.printable import printable


@given(st.text())
def test_printable_of_any_text_commands_nothing_and_keeps_the_rest(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    if text.isprintable():
        assert shown == text


def test_given_a_line_end_when_shown_then_it_is_escaped() -> None:
    assert printable("a\nb\x1b[2Jä\u202e") == "a\\nb\\x1b[2Jä\\u202e"
