"""The four layers of settings, their merge, and the errors of invalid settings."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from tms_core.errors import ConfigurationError
from tms_core.settings import CONFIG_ENV, yaml_file
from tms_core.settings.fields import DEFAULT, STORE, S, Section, extra, fields, kinds, section_of, text

PREFIX = "TMS_"

#: For each flag, a function from its text to values by the path of the setting.
Flags = Mapping[str, Callable[[str], Mapping[str, object]]]

_INJECTED = (
    "Separate names with two underscores (TMS_SERVER__PORT). If Kubernetes set the variable for a Service of this name,"
    " set enableServiceLinks: false in the pod."
)


class SettingEntry(NamedTuple):
    """An effective setting: its path, value, and the origin of the value."""

    path: str
    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class LoadedSettings(Generic[S]):
    """The effective settings.

    Attributes:
        origins: the source of each value, by the path of its setting; defaults are omitted.
    """

    settings: S
    origins: Mapping[str, str]

    def origin(self, path: str) -> str:
        """Return ``flag --leveldb``, ``environment TMS_…``, ``file conf/x.yaml`` or ``default``."""
        return self.origins.get(path, DEFAULT)

    def entries(self) -> list[SettingEntry]:
        """Return all settings in the order of the models."""
        return [SettingEntry(path, value, self.origin(path)) for path, value in _values(self.settings, "")]


def load_as(
    model: type[S],
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, object],
    known_flags: Flags,
) -> LoadedSettings[S]:
    """Read, merge and check all four layers.

    Args:
        file: a YAML file; None: no file.
        flags: the text of each flag by its name without dashes; None: the flag is not given.
        known_flags: the settings that each flag sets.

    Raises:
        ConfigurationError: a setting is invalid; the message names the setting, its source and a valid value. Or the
            current folder, from which relative paths start, was deleted.
    """
    known = dict(fields(model))
    try:
        folder = (Path() if file is None else file.parent).absolute()
    except FileNotFoundError as error:
        raise ConfigurationError("The current folder was deleted.", "Change to an existing folder: cd DIR") from error
    sources = {
        path: _SourcedValue(field.default, DEFAULT, folder) for path, field in known.items() if _has_place(field)
    }
    if file is not None:
        named = environ.get(CONFIG_ENV)
        is_of_environment = named is not None and Path(named) == file
        sources |= _from_file(model, file, folder, CONFIG_ENV if is_of_environment else "--config FILE")
    sources |= _from_environment(model, known, environ, folder)
    sources |= _from_flags(flags, known_flags)
    origins = {path: value.origin for path, value in sources.items() if value.origin != DEFAULT}
    values = {path: _resolve_path(path, known[path], value) for path, value in sources.items()}
    values |= _derived_folders(known, values, origins)
    try:
        return LoadedSettings(model.model_validate(_nest(values)), origins)
    except ValidationError as error:
        raise merge_errors(error.errors(include_url=False), known, origins) from error


class _SourcedValue(NamedTuple):
    """A value, its source, and the base folder of a relative path."""

    value: object
    origin: str
    folder: Path


def _from_file(model: type[Section], file: Path, folder: Path, source: str) -> dict[str, _SourcedValue]:
    origin = f"file {file}"
    content = yaml_file.read(file, source)
    own = {key: value for key, value in content.items() if key not in model.ignored_names}
    return {path: _SourcedValue(value, origin, folder) for path, value in _flat(model, own, "", origin)}


def _flat(
    model: type[Section], mapping: Mapping[Any, object], prefix: str, origin: str
) -> Iterator[tuple[str, object]]:
    for key, value in mapping.items():
        path = f"{prefix}{key}"
        field = model.model_fields.get(key) if isinstance(key, str) else None
        if field is None:
            raise ConfigurationError(f"{path} is not a setting ({origin}).", suggest_setting(path, model, prefix))
        inner = section_of(field)
        if inner is None:
            yield path, value
        elif isinstance(value, dict):
            yield from _flat(inner, value, f"{path}.", origin)
        elif value is not None:  # None is a section with only comments
            names = ", ".join(inner.model_fields)
            raise ConfigurationError(
                f"{path} is a section, not {cut_value(value)} ({origin}).", f"Write below it: {names}."
            )


def _from_environment(
    model: type[Section], known: Mapping[str, FieldInfo], environ: Mapping[str, str], folder: Path
) -> dict[str, _SourcedValue]:
    values = {}
    for name, value in environ.items():
        inner = name.removeprefix(PREFIX).lower()
        if not name.startswith(PREFIX) or not any(f"{inner}_".startswith(f"{top}_") for top in model.model_fields):
            continue
        path, origin = inner.replace("__", "."), f"environment {name}"
        # Accept one spelling only: of two spellings, an arbitrary one would win.
        if path not in known or name != name.upper():
            close = path if path in known else closest(path, known)
            better = f"Did you mean {PREFIX}{close.replace('.', '__').upper()}? " if close else ""
            raise ConfigurationError(f"{name} in the environment is not a setting.", better + _INJECTED)
        values[path] = _SourcedValue(_scalar(path, known[path], value, origin), origin, folder)
    return values


def _from_flags(flags: Mapping[str, object], known_flags: Flags) -> dict[str, _SourcedValue]:
    return {
        path: _SourcedValue(value, f"flag --{name}", Path.cwd())
        for name, flag_value in flags.items()
        if flag_value is not None
        for path, value in known_flags[name](str(flag_value)).items()
    }


def _scalar(path: str, field: FieldInfo, value: str, origin: str) -> object:
    """Parse a value of the environment: text stays unchanged, other types are YAML."""
    accepted = list(kinds(field.annotation))
    if type(None) in accepted and value in ("", "null"):
        return None
    if any(kind in (str, Path) or get_origin(kind) is Literal for kind in accepted):
        return value
    try:
        return yaml_file.parse(value)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(f"{path} = {value!r} ({origin}) cannot be read.", help_text(path, field)) from error


def _has_place(field: FieldInfo) -> bool:
    return extra(field, "place") is True and field.default not in (None, PydanticUndefined)


def _resolve_path(path: str, field: FieldInfo, value: _SourcedValue) -> object:
    if not extra(field, "place") or not isinstance(value.value, str | Path):
        return value.value
    place = str(value.value)
    # No file has such a name, and Python's errors for it are not errors of the system.
    is_name = "\0" not in place and not re.search("[\ud800-\udbff]", place)
    if not place or place.startswith("~") or not is_name:
        raise ConfigurationError(
            f"{path} = {place!r} ({value.origin}) is not a path.", "Write the full path; ~ is not expanded."
        )
    return place if "://" in place else str(value.folder / place)


def _derived_folders(
    known: Mapping[str, FieldInfo], values: Mapping[str, object], origins: Mapping[str, str]
) -> dict[str, str]:
    """Return the defaults that derive from the LevelDB store's path, so that two stores never share a folder."""
    store = values.get(STORE)
    if not isinstance(store, str):
        return {}
    # Resolved, so that all symbolic links to a store lead to the same folders.
    try:
        folder = Path(store).resolve()
    except RuntimeError as error:  # up to Python 3.12
        raise ConfigurationError(
            f"{store} cannot be used: it is in a loop of symbolic links.", f"Correct {STORE}, or the links."
        ) from error
    suffixes = {path: extra(field, "suffix") for path, field in known.items() if path not in origins}
    return {path: f"{folder}{suffix}" for path, suffix in suffixes.items() if suffix}


def _nest(values: Mapping[str, object]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        section = root
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return root


def _values(section: Section, prefix: str) -> Iterator[tuple[str, object]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def merge_errors(
    errors: Iterable[ErrorDetails], known: Mapping[str, FieldInfo], origins: Mapping[str, str]
) -> ConfigurationError:
    """Return one error for all errors of pydantic.

    Args:
        known: every setting by its path.
        origins: the origin of each value, by path.
    """
    problems, hint = [], ""
    paths: list[str] = []
    for error in errors:
        path = _path(error)
        if error["type"] == "too_short" and any(wrong.startswith(f"{path}[") for wrong in paths):
            continue  # the list is only too short without its invalid entries
        paths.append(path)
        setting = next((name for name in known if path == name or path.startswith((f"{name}.", f"{name}["))), path)
        origin = origins.get(setting, DEFAULT)
        match error["type"]:
            case "missing":
                problems.append(f"{path} is missing")
            case "extra_forbidden":
                problems.append(f"{path} is not a setting ({origin})")
            case "setting":
                problems.append(f"{path} ({origin}): {error['msg']}")
            case _:
                problems.append(f"{path} = {cut_value(error['input'])} ({origin}): {_problem(error)}")
        hint = hint or (help_text(setting, known[setting]) if setting in known else "")
    return ConfigurationError("; ".join(problems) + ".", hint)


def _path(error: ErrorDetails) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    inside = f".{error['ctx']['setting']}" if error["type"] == "setting" else ""
    return (path + inside).removeprefix(".")


def _problem(error: ErrorDetails) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "tuple_type":
        return f"this is not a list; write [{text(error['input'])}]"
    return (error["msg"][:1].lower() + error["msg"][1:]).replace("tuple", "list")


def cut_value(value: object) -> str:
    """Return the representation of an invalid value, cut to 200 characters."""
    return repr(value)[:200]


def help_text(path: str, field: FieldInfo) -> str:
    """Return the hint for an invalid value of a setting: its description and default."""
    default = "" if field.is_required() else f"; default: {text(field.default)}"
    return f"Correct {path}: {field.description}{default}."


def suggest_setting(path: str, model: type[Section], prefix: str) -> str:
    """Return the hint for an unknown setting of a section: the most similar setting, else all settings."""
    names = [f"{prefix}{name}" for name in model.model_fields]
    inside = [f"{prefix}{name}" for name, _ in fields(model)]
    close = closest(path, [*names, *inside])
    return f"Did you mean {close}?" if close else f"Valid settings: {', '.join(names)}."


def closest(path: str, known: Iterable[str]) -> str | None:
    """Return the known setting with other separators or a similar last part; None if there is no such setting."""
    for name in known:
        if name.replace(".", "_") == path.replace(".", "_"):
            return name
    last = path.rpartition(".")[2]
    matches = difflib.get_close_matches(path, known, n=5, cutoff=0.6)
    return next((name for name in matches if difflib.get_close_matches(last, [name.rpartition(".")[2]])), None)
