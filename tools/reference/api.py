"""Write ``api.md``, the reference of the Python interface, from the code; tests compare the code with the page.

Run it from the root of a checkout: ``python -m tools.reference.api``.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).parents[2] / "docs/reference/api.md"

#: The public modules; each has ``__all__``.
MODULES = (
    "tms_core.client",
    "tms_core.client.testing",
    "tms_core.clock",
    "janitor.spark.session",
    "janitor.spark.source",
    "janitor.spark.stream.publish",
)

HEAD = """\
# Python interface

Made from the code by `python -m tools.reference.api`; change the code, not this page.

You may import the names below, each from the module under whose heading it stands. Everything else is private,
whatever its name: it changes without notice. A name is public if it is in the `__all__` of one of these modules.

A public name or parameter is removed, or changes its meaning, in two steps. A minor version marks it as deprecated in
`CHANGELOG.md` and warns with `DeprecationWarning` where it is used. The second minor version after that one may remove
it, six months later at the earliest. New names, and new parameters with a default, come with any version.
"""


class _Raw:
    """An annotation that prints as it is written in the source."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def page() -> str:
    """Return the whole page."""
    return HEAD + "".join(_module(import_module(name)) for name in MODULES)


def _module(module: ModuleType) -> str:
    found = [(name, getattr(module, name)) for name in sorted(module.__all__)]
    return (
        f"\n## {module.__name__}\n\n" + "\n".join(line for name, value in found for line in _entry(name, value)) + "\n"
    )


def _entry(name: str, value: Any) -> Iterator[str]:
    """Yield a name with its signature and sentence, and the members of a class."""
    if not inspect.isclass(value):
        yield f"- `{name}{_signature(value)}`: {_sentence(value)}"
        return
    if issubclass(value, Exception):
        bases = ", ".join(base.__name__ for base in value.__bases__)
        yield f"- `{name}({bases})`, an error: {_sentence(value)}"
        return
    if issubclass(value, enum.Enum):
        yield f"- `{name}`, one of {', '.join(f'`{one.name}`' for one in value)}: {_sentence(value)}"
        return
    yield f"- `{name}{_signature(value)}`: {_sentence(value)}"
    for member, found in inspect.getmembers(value):
        if not member.startswith("_") and (line := _member(member, found)):
            yield f"    - {line}"


def _member(name: str, value: Any) -> str | None:
    """Return a method or a property of a class of this project; None: it is something else."""
    if isinstance(value, property):
        return f"`{name}`: {_sentence(value)}"
    if not inspect.isroutine(value) or not str(getattr(value, "__module__", "")).startswith(("tms_core.", "janitor.")):
        return None
    asynchronous = "await " if inspect.iscoroutinefunction(value) else ""
    return f"`{asynchronous}{name}{_signature(value)}`: {_sentence(value)}"


def _signature(value: Any) -> str:
    found = inspect.signature(value)
    own = [
        each.replace(annotation=_print_annotation(each.annotation), default=_print_default(each.default))
        for each in found.parameters.values()
        if each.name != "self"
    ]
    return str(found.replace(parameters=own, return_annotation=_print_annotation(found.return_annotation)))


def _print_annotation(annotation: Any) -> Any:
    # A NamedTuple's constructor has ForwardRef objects up to Python 3.13, and strings from 3.14 on.
    text = getattr(annotation, "__forward_arg__", annotation)
    return _Raw(text) if isinstance(text, str) else text


def _print_default(default: Any) -> Any:
    """Return a default that prints the same in every process: a function as its name."""
    return _Raw(default.__qualname__) if inspect.isroutine(default) else default


def _sentence(value: Any) -> str:
    """Return the first sentence of a docstring, in one line."""
    first = (inspect.getdoc(value) or "").partition("\n\n")[0]
    return " ".join(first.split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
