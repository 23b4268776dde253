"""The Python API: public names, and a record of every change."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from tools.reference import api


@pytest.mark.parametrize("name", api.MODULES)
def test_public_module_lists_existing_documented_names(name: str) -> None:
    module = import_module(name)
    assert module.__all__
    assert [each for each in module.__all__ if not inspect.getdoc(getattr(module, each))] == []


def test_page_with_a_changed_signature_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("janitor.spark.source")

    def register(spark: object, *, more: bool = False) -> None:
        """Do as before."""

    monkeypatch.setattr(module, "register", register)
    assert "`register(spark: object, *, more: bool = False) -> None`: Do as before." in api.page()
    assert api.page() != api.PAGE.read_text(encoding="utf-8")
