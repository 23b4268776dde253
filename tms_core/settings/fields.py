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

#: The origin of a value that no layer gave.
DEFAULT = "default"
#: The setting from which other folders derive their defaults.
STORE = "storage.leveldb.path"


class Section(BaseModel):
    """A section of settings; an unknown setting is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Names at the top of the file that belong to another program.
    left_alone: ClassVar[frozenset[str]] = frozenset()


S = TypeVar("S", bound=Section)


def setting(
    default: object, meaning: str, *, reason: str, unit: str = "", place: bool = False, suffix: str = ""
) -> Any:
    """Declare a setting.

    Args:
        default: the value without any layer; ``...``: required.
        meaning: its description.
        reason: the reason for the default.
        unit: the unit of a number.
        place: whether it is a path (or a URL); a relative one starts at the folder of the file.
        suffix: the default is the LevelDB store's folder with this suffix; ``default`` is that of the default store.
    """
    return Field(
        default,
        description=meaning,
        json_schema_extra={"reason": reason, "unit": unit, "place": place, "suffix": suffix},
    )


def wrong(name: str, problem: str) -> PydanticCustomError:
    """Return the error of a check over several settings, with the name of the setting to change."""
    return PydanticCustomError("setting", "{problem}", {"setting": name, "problem": problem})


def text(value: object) -> str:
    """Return a value as one would write it into the file."""
    if isinstance(value, Path):
        value = str(value)
    return json.dumps(value, default=_plain, ensure_ascii=False)


def fields(model: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every setting of a model by its path, sections gone through."""
    for name, field in model.model_fields.items():
        inner = section_of(field)
        if inner is None:
            yield prefix + name, field
        else:
            yield from fields(inner, f"{prefix}{name}.")


def kinds(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, of an annotated type the type itself."""
    if get_origin(annotation) is Annotated:
        yield from kinds(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from kinds(member)
    else:
        yield annotation


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section a field is, None for a single setting."""
    return next(
        (kind for kind in kinds(field.annotation) if isinstance(kind, type) and issubclass(kind, Section)), None
    )


def extra(field: FieldInfo, name: str) -> object:
    """Return ``reason``, ``unit``, ``place`` or ``suffix`` of a setting, as declared with :func:`setting`."""
    return field.json_schema_extra.get(name) if isinstance(field.json_schema_extra, dict) else None


def _plain(value: object) -> object:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)
