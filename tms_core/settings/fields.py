"""Declarations of settings: sections of pydantic models whose fields have descriptions."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

#: The origin of a value that no layer sets.
DEFAULT = "default"
#: The setting from which other folders derive their defaults.
STORE = "storage.leveldb.path"


class Section(BaseModel):
    """A section of settings; an unknown setting is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Top-level names of the file that belong to another program.
    ignored_names: ClassVar[frozenset[str]] = frozenset()


S = TypeVar("S", bound=Section)


def setting(
    default: object, meaning: str, *, reason: str, unit: str = "", place: bool = False, suffix: str = ""
) -> Any:
    """Declare a setting.

    Args:
        default: the default; ``...`` if the setting is required.
        meaning: the description.
        reason: the reason for the default.
        unit: the unit of a number.
        place: whether the value is a path (or a URL); relative paths start at the folder of the file.
        suffix: the default is the LevelDB store's folder with this suffix; ``default`` shows it for the default store.
    """
    return Field(
        default,
        description=meaning,
        json_schema_extra={"reason": reason, "unit": unit, "place": place, "suffix": suffix},
    )


def invalid(name: str, problem: str) -> PydanticCustomError:
    """Return the error of a check across settings; ``name`` is the setting to change."""
    return PydanticCustomError("setting", "{problem}", {"setting": name, "problem": problem})


def text(value: object) -> str:
    """Return a value as it is written in the file."""
    if isinstance(value, Path):
        value = str(value)
    return json.dumps(value, default=_plain, ensure_ascii=False)


def fields(model: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every setting of a model and its sections, with its path."""
    for name, field in model.model_fields.items():
        inner = section_of(field)
        if inner is None:
            yield prefix + name, field
        else:
            yield from fields(inner, f"{prefix}{name}.")


def kinds(annotation: Any) -> Iterator[Any]:
    """Yield the member types of a union, without annotations."""
    if get_origin(annotation) is Annotated:
        yield from kinds(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from kinds(member)
    else:
        yield annotation


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section class of a field; None for a single setting."""
    return next(
        (kind for kind in kinds(field.annotation) if isinstance(kind, type) and issubclass(kind, Section)), None
    )


def extra(field: FieldInfo, name: str) -> object:
    """Return the argument ``reason``, ``unit``, ``place`` or ``suffix`` of :func:`setting`."""
    return field.json_schema_extra.get(name) if isinstance(field.json_schema_extra, dict) else None


def _plain(value: object) -> object:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)
