"""Settings out of four layers (flags, environment, file, defaults), each value with where it came from.

Whoever debugs a configuration asks "where does this value come from", so every layer is read into the same flat form,
setting by setting with its origin, before anything is checked, and every error can name the line to change. That is
why this is not left to a settings library: those merge first and forget. A mistyped setting is an error with a
suggestion and never a default in silence: a janitor that missed a ``protect`` would delete.
"""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError, PydanticUndefined

from tms_core.errors import ConfigurationError

PREFIX = "TMS_"
DEFAULT = "default"

#: What a flag sets: its text to values by the path of the setting.
Flags = Mapping[str, Callable[[str], Mapping[str, object]]]

_INJECTED = (
    "Names nest with two underscores (TMS_SERVER__PORT). If Kubernetes put it there for a Service of such a name, "
    "set enableServiceLinks: false in the pod."
)


class Section(BaseModel):
    """Settings that belong together; a setting that is none of them is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Names at the top of the file that are somebody else's.
    left_alone: ClassVar[frozenset[str]] = frozenset()


S = TypeVar("S", bound=Section)


def setting(default: object, meaning: str, *, reason: str, unit: str = "", place: bool = False) -> Any:
    """Declare a setting.

    Args:
        default: its value when nobody says otherwise; ``...`` if it has to be given.
        meaning: what it is.
        reason: why the default is what it is.
        unit: of a number.
        place: it is a path (or a URL); a relative one starts at the folder of the file.
    """
    return Field(default, description=meaning, json_schema_extra={"reason": reason, "unit": unit, "place": place})


def wrong(name: str, problem: str) -> PydanticCustomError:
    """What a check over several settings raises: which of them to change, named from where the check stands."""
    return PydanticCustomError("setting", "{problem}", {"setting": name, "problem": problem})


def text(value: object) -> str:
    """A value as one would write it into the file."""
    if isinstance(value, Path):
        value = str(value)
    return json.dumps(value, default=_plain, ensure_ascii=False)


class Entry(NamedTuple):
    """One setting in force."""

    path: str
    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class Loaded(Generic[S]):
    """Settings in force.

    Attributes:
        origins: by a setting's path, where its value came from; defaults are not listed.
    """

    settings: S
    origins: Mapping[str, str]

    def origin(self, path: str) -> str:
        """``flag --leveldb``, ``environment TMS_…``, ``file conf/x.yaml`` or ``default``."""
        return self.origins.get(path, DEFAULT)

    def entries(self) -> list[Entry]:
        """Every setting with its value and origin, in the order of the models."""
        return [Entry(path, value, self.origin(path)) for path, value in _values(self.settings, "")]


def fields(model: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting of a model by its path, sections gone through."""
    for name, field in model.model_fields.items():
        inner = _section(field)
        if inner is None:
            yield prefix + name, field
        else:
            yield from fields(inner, f"{prefix}{name}.")


def load_as(
    model: type[S], file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object], known_flags: Flags
) -> Loaded[S]:
    """Read, merge and check all four layers.

    Args:
        file: a YAML file; None for none.
        flags: by name without dashes; None is a flag not given.
        known_flags: what each of them sets.

    Raises:
        ConfigurationError: names the setting, where it came from and what to write.
    """
    known = dict(fields(model))
    folder = (Path() if file is None else file.parent).absolute()
    given = {path: _Given(field.default, DEFAULT, folder) for path, field in known.items() if _has_place(field)}
    if file is not None:
        given |= _from_file(model, file, folder)
    given |= _from_environment(model, known, environ, folder)
    given |= _from_flags(flags, known_flags)
    origins = {path: value.origin for path, value in given.items() if value.origin != DEFAULT}
    values = {path: _placed(path, known[path], value) for path, value in given.items()}
    try:
        return Loaded(model.model_validate(_nested(values)), origins)
    except ValidationError as error:
        raise _explained(error.errors(include_url=False), known, origins) from error


class _Given(NamedTuple):
    """A value, where it came from, and where it starts if it is a relative path."""

    value: object
    origin: str
    folder: Path


# --- the layers ------------------------------------------------------------------------------------------------------


def _from_file(model: type[Section], file: Path, folder: Path) -> dict[str, _Given]:
    origin = f"file {file}"
    content = _read(file)
    own = {key: value for key, value in content.items() if key not in model.left_alone}
    return {path: _Given(value, origin, folder) for path, value in _flat(model, own, "", origin)}


def _flat(
    model: type[Section], mapping: Mapping[Any, object], prefix: str, origin: str
) -> Iterator[tuple[str, object]]:
    for key, value in mapping.items():
        path = f"{prefix}{key}"
        field = model.model_fields.get(key) if isinstance(key, str) else None
        if field is None:
            raise ConfigurationError(f"{path} is not a setting ({origin}).", _meant(path, model, prefix))
        inner = _section(field)
        if inner is None:
            yield path, value
        elif isinstance(value, dict):
            yield from _flat(inner, value, f"{path}.", origin)
        elif value is not None:  # a section all of whose lines are commented out is None
            names = ", ".join(inner.model_fields)
            raise ConfigurationError(f"{path} is a section, not {text(value)} ({origin}).", f"Write below it: {names}.")


def _from_environment(
    model: type[Section], known: Mapping[str, FieldInfo], environ: Mapping[str, str], folder: Path
) -> dict[str, _Given]:
    given = {}
    for name, value in environ.items():
        inner = name.removeprefix(PREFIX).lower()
        if not name.startswith(PREFIX) or not any(f"{inner}_".startswith(f"{top}_") for top in model.model_fields):
            continue
        path, origin = inner.replace("__", "."), f"environment {name}"
        if path not in known:
            close = _close(path, known)
            meant = f"Did you mean {PREFIX}{close.replace('.', '__').upper()}? " if close else ""
            raise ConfigurationError(f"{name} in the environment is not a setting.", meant + _INJECTED)
        given[path] = _Given(_scalar(path, known[path], value, origin), origin, folder)
    return given


def _from_flags(flags: Mapping[str, object], known_flags: Flags) -> dict[str, _Given]:
    return {
        path: _Given(value, f"flag --{name}", Path.cwd())
        for name, given in flags.items()
        if given is not None
        for path, value in known_flags[name](str(given)).items()
    }


# --- reading ---------------------------------------------------------------------------------------------------------


class _UniqueKeys(yaml.SafeLoader):
    """YAML's safe loader, which would let the later of two equal keys win, without that."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is there twice", problem_mark=key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return node


def _read(file: Path) -> dict[Any, object]:
    try:
        loader = _UniqueKeys(file.read_text(encoding="utf-8"))
        content = loader.get_single_data()
    except OSError as error:
        raise ConfigurationError(f"the configuration file {file} cannot be read: {error.strerror}.") from error
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigurationError(f"file {file}{line} is not YAML: {error.problem}.") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(f"file {file} is not YAML: {error}.") from error
    if not isinstance(content, dict | None):
        raise ConfigurationError(f"file {file} is not a mapping.", "Write sections into it, such as `storage:`.")
    return content or {}


def _scalar(path: str, field: FieldInfo, value: str, origin: str) -> object:
    """A value of the environment: text as it is, everything else as YAML."""
    kinds = list(_kinds(field.annotation))
    if type(None) in kinds and value in ("", "null"):
        return None
    if any(kind in (str, Path) or get_origin(kind) is Literal for kind in kinds):
        return value
    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(f"{path} = {value!r} ({origin}) cannot be read.", _help(field)) from error


def _has_place(field: FieldInfo) -> bool:
    return _extra(field, "place") is True and field.default not in (None, PydanticUndefined)


def _placed(path: str, field: FieldInfo, given: _Given) -> object:
    if not _extra(field, "place") or not isinstance(given.value, str | Path):
        return given.value
    place = str(given.value)
    if not place or place.startswith("~"):
        raise ConfigurationError(
            f"{path} = {place!r} ({given.origin}) is not a path.", "Write it out; ~ is not expanded."
        )
    return place if "://" in place else str(given.folder / place)


def _nested(values: Mapping[str, object]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        section = root
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return root


# --- models ----------------------------------------------------------------------------------------------------------


def _kinds(annotation: Any) -> Iterator[Any]:
    """The members of a union, of an annotated type the type itself."""
    if get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _kinds(member)
    else:
        yield annotation


def _section(field: FieldInfo) -> type[Section] | None:
    return next(
        (kind for kind in _kinds(field.annotation) if isinstance(kind, type) and issubclass(kind, Section)), None
    )


def _values(section: Section, prefix: str) -> Iterator[tuple[str, object]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _extra(field: FieldInfo, name: str) -> object:
    return field.json_schema_extra.get(name) if isinstance(field.json_schema_extra, dict) else None


def _plain(value: object) -> object:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


# --- explaining ------------------------------------------------------------------------------------------------------


def _explained(
    errors: Iterable[ErrorDetails], known: Mapping[str, FieldInfo], origins: Mapping[str, str]
) -> ConfigurationError:
    problems, hint = [], ""
    for error in errors:
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
        if error["type"] == "setting":
            path += "." + error["ctx"]["setting"]
        path = path.removeprefix(".")
        leaf = next((name for name in known if path == name or path.startswith((f"{name}.", f"{name}["))), path)
        shown = f" = {text(error['input'])}" if error["type"] not in ("setting", "missing") else ""
        origin = origins.get(leaf, DEFAULT)
        problems.append(f"{path}{shown} ({origin}): {_sentence(error)}")
        hint = hint or (_help(known[leaf]) if leaf in known else "")
    return ConfigurationError("; ".join(problems) + ".", hint)


def _sentence(error: ErrorDetails) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    message = error["msg"]
    return message[:1].lower() + message[1:]


def _help(field: FieldInfo) -> str:
    default = "" if field.is_required() else f"; the default is {text(field.default)}"
    return f"It is {field.description}{default}."


def _meant(path: str, model: type[Section], prefix: str) -> str:
    names = [f"{prefix}{name}" for name in model.model_fields]
    inside = [f"{prefix}{name}" for name, _ in fields(model)]
    close = _close(path, [*names, *inside])
    return f"Did you mean {close}?" if close else f"There are: {', '.join(names)}."


def _close(path: str, known: Iterable[str]) -> str | None:
    """The setting that was probably meant: one written with the wrong separator, or nearly alike in its last part."""
    for name in known:
        if name.replace(".", "_") == path.replace(".", "_"):
            return name
    last = path.rpartition(".")[2]
    alike = difflib.get_close_matches(path, known, n=5, cutoff=0.6)
    return next((name for name in alike if difflib.get_close_matches(last, [name.rpartition(".")[2]])), None)
