"""Names: no two classes have the same name."""

from __future__ import annotations

import pytest

from tools.architecture import PACKAGES, ROOT, Module, read, repeated_names

#: Class names that more than one module has, and why.
SHARED_NAMES = {
    "Message": "what the server stores, and what its client gets, which says the same in types of its own",
    "Limits": "of a client's buffers, and of one run",
    "Reason": "of a decision of the rules, and of a health that is not good",
    "Settings": "each of the two programs has its own",
}


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return read(ROOT, PACKAGES)


def test_classes_with_the_same_name_have_a_recorded_reason(modules: list[Module]) -> None:
    assert {name: where for name, where in repeated_names(modules).items() if name not in SHARED_NAMES} == {}
