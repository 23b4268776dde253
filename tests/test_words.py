"""Names: no two classes have the same name."""

from __future__ import annotations

import pytest

from tools.architecture import PACKAGES, ROOT, Module, read, repeated_names

#: The class names of several modules, with the reason.
SHARED_NAMES = {
    "Message": "the stored message of the server, and the message of the client",
    "Limits": "the limits of a client's buffers, and of a run",
    "Reason": "the reason of a decision of the rules, and of a health level",
    "Settings": "the settings of each program",
}


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return read(ROOT, PACKAGES)


def test_classes_with_the_same_name_have_a_recorded_reason(modules: list[Module]) -> None:
    assert {name: where for name, where in repeated_names(modules).items() if name not in SHARED_NAMES} == {}
