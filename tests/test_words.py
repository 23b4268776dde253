"""Plain words: no text of the program makes its reader guess who is meant, and no name stands for two classes."""

from __future__ import annotations

import pytest

from tools.house import PACKAGES, ROOT, Module, read, repeated_names, riddles

#: Class names that more than one module has, and why.
SHARED_NAMES = {
    "Message": "what the server stores, and what its client gets, which says the same in types of its own",
    "Limits": "of a client's buffers, and of one run",
    "Reason": "of a decision of the law, and of a health that is not good",
    "Settings": "each of the two programs has its own",
}


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return read(ROOT, PACKAGES)


def test_given_all_modules_when_read_then_no_word_in_them_makes_a_reader_guess_who_is_meant(
    modules: list[Module],
) -> None:
    assert riddles(modules) == {}


def test_given_all_classes_when_two_have_one_name_then_there_is_a_reason(modules: list[Module]) -> None:
    assert {name: where for name, where in repeated_names(modules).items() if name not in SHARED_NAMES} == {}
