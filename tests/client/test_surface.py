"""The public names of the client: complete, and without accidental exports."""

from __future__ import annotations

import ast
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from tms_core import client, errors
from tms_core.client.protocol import values
from tms_core.client.publish import buffer as waiting

HERE = Path(client.__file__).parent
#: Classes whose methods an application calls.
CLASSES = [
    client.Client,
    client.AsyncClient,
    client.Messages,
    client.AsyncMessages,
    client.Consumption,
    client.AsyncConsumption,
    client.TransactionContext,
    client.AsyncTransactionContext,
    client.Participant,
    client.Producer,
    client.AsyncProducer,
]
#: Internal base classes and parts of the exported classes.
INNER = {"Core", "Call", "Consuming", "MessageBatches", "Instance", "Rotation"}


def methods(kind: type) -> Iterator[tuple[str, typing.Any]]:
    for name, member in inspect.getmembers(kind):
        if name == "__init__" or not name.startswith("_"):
            yield name, member.fget if isinstance(member, property) else member


def mentioned(annotation: object) -> Iterator[type]:
    if isinstance(annotation, type) and annotation.__module__.startswith("tms_core."):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from mentioned(inner)
    if isinstance(annotation, types.UnionType):
        for inner in annotation.__args__:
            yield from mentioned(inner)


def test_package_exports_exactly_what_it_imports() -> None:
    tree = ast.parse((HERE / "__init__.py").read_text(encoding="utf-8"))
    imported = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    assert sorted(imported) == client.__all__


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_in_a_method_signature_is_exported(kind: type) -> None:
    found = set()
    for _, method in methods(kind):
        hints = typing.get_type_hints(method)
        found |= {cls.__name__ for hint in hints.values() for cls in mentioned(hint)}
    assert {name for name in found if not name.startswith("_")} - set(client.__all__) - INNER == set()


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_in_a_method_docstring_is_exported(kind: type) -> None:
    known = {name for name, error in vars(errors).items() if inspect.isclass(error)} | {"OutcomeUnknown"}
    for name, method in methods(kind):
        raises = (inspect.getdoc(method) or "").partition("Raises:")[2]
        named = {word for word in re.findall(r"\b[A-Z]\w+", raises) if word in known}
        assert named <= set(client.__all__), name


def test_every_error_and_value_is_exported() -> None:
    families = (errors.MessagingError, errors.TransactionError)
    found = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, families)}
    servers_own = {"TransactionExpired", "ClockJumped", "ChangesTooLarge", "TruncateTimeError", "CannotSnapshot"}
    # A client receives a BadRequest instead.
    servers_own |= {"TooLarge"}
    for module in (values, waiting):
        kinds = {name: kind for name, kind in vars(module).items() if inspect.isclass(kind) and name[0] != "_"}
        found |= {name for name, kind in kinds.items() if kind.__module__ == module.__name__}
    assert found - servers_own - {"MessageBatch", "MessageBuffer"} <= set(client.__all__)


def test_every_exported_name_and_method_has_a_docstring() -> None:
    assert [name for name in client.__all__ if not inspect.getdoc(getattr(client, name))] == []
    named = [(kind, *named) for kind in CLASSES for named in methods(kind)]
    assert [(kind, name) for kind, name, method in named if name != "__init__" and not inspect.getdoc(method)] == []
