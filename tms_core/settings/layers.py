"""The four layers, merged setting by setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tms_core.errors import ConfigurationError
from tms_core.settings import yaml_file
from tms_core.settings.explain import closest, explained, help_text, meant, shown
from tms_core.settings.fields import DEFAULT, S, Section, extra, fields, kinds, section_of

PREFIX = "TMS_"

#: What a flag sets: its text to values by the path of the setting.
Flags = Mapping[str, Callable[[str], Mapping[str, object]]]

_INJECTED = (
    "Names nest with two underscores (TMS_SERVER__PORT). If Kubernetes put it there for a Service of such a name, "
    "set enableServiceLinks: false in the pod."
)


class SettingEntry(NamedTuple):
    """One setting in force."""

    path: str
    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class LoadedSettings(Generic[S]):
    """Settings in force.

    Attributes:
        origins: by a setting's path, where its value came from; defaults are not listed.
    """

    settings: S
    origins: Mapping[str, str]

    def origin(self, path: str) -> str:
        """``flag --leveldb``, ``environment TMS_…``, ``file conf/x.yaml`` or ``default``."""
        return self.origins.get(path, DEFAULT)

    def entries(self) -> list[SettingEntry]:
        """Every setting with its value and origin, in the order of the models."""
        return [SettingEntry(path, value, self.origin(path)) for path, value in _values(self.settings, "")]


def load_as(
    model: type[S],
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, object],
    known_flags: Flags,
    moved_defaults: Flags = MappingProxyType({}),
) -> LoadedSettings[S]:
    """Read, merge and check all four layers.

    Args:
        file: a YAML file; None for none.
        flags: by name without dashes; None is a flag not given.
        known_flags: what each of them sets.
        moved_defaults: what those that are named here set only where neither file nor environment does.

    Raises:
        ConfigurationError: names the setting, where it came from and what to write.
    """
    known = dict(fields(model))
    folder = (Path() if file is None else file.parent).absolute()
    given = {path: _Given(field.default, DEFAULT, folder) for path, field in known.items() if _has_place(field)}
    given |= _from_flags({name: flags.get(name) for name in moved_defaults}, moved_defaults)
    if file is not None:
        given |= _from_file(model, file, folder)
    given |= _from_environment(model, known, environ, folder)
    given |= _from_flags(flags, known_flags)
    origins = {path: value.origin for path, value in given.items() if value.origin != DEFAULT}
    values = {path: _placed(path, known[path], value) for path, value in given.items()}
    try:
        return LoadedSettings(model.model_validate(_nested(values)), origins)
    except ValidationError as error:
        raise explained(error.errors(include_url=False), known, origins) from error


class _Given(NamedTuple):
    """A value, where it came from, and where it starts if it is a relative path."""

    value: object
    origin: str
    folder: Path


def _from_file(model: type[Section], file: Path, folder: Path) -> dict[str, _Given]:
    origin = f"file {file}"
    content = yaml_file.read(file)
    own = {key: value for key, value in content.items() if key not in model.left_alone}
    return {path: _Given(value, origin, folder) for path, value in _flat(model, own, "", origin, model.removed)}


def _flat(
    model: type[Section], mapping: Mapping[Any, object], prefix: str, origin: str, removed: Mapping[str, str]
) -> Iterator[tuple[str, object]]:
    for key, value in mapping.items():
        path = f"{prefix}{key}"
        _refuse_removed(path, value, origin, removed)
        field = model.model_fields.get(key) if isinstance(key, str) else None
        if field is None:
            raise ConfigurationError(f"{path} is not a setting ({origin}).", meant(path, model, prefix))
        inner = section_of(field)
        if inner is None:
            yield path, value
        elif isinstance(value, dict):
            yield from _flat(inner, value, f"{path}.", origin, removed)
        elif value is not None:  # a section all of whose lines are commented out is None
            names = ", ".join(inner.model_fields)
            raise ConfigurationError(
                f"{path} is a section, not {shown(value)} ({origin}).", f"Write below it: {names}."
            )


def _refuse_removed(path: str, value: object, origin: str, removed: Mapping[str, str]) -> None:
    """Refuse what an earlier version had, and say what to do instead."""
    for gone, instead in removed.items():
        if path == gone or path.startswith(f"{gone}."):
            raise ConfigurationError(f"{path} is no longer a setting ({origin}).", instead)
        if gone == f"{path}={value}":
            raise ConfigurationError(f"{path} = {value} is no longer possible ({origin}).", instead)


def _from_environment(
    model: type[Section], known: Mapping[str, FieldInfo], environ: Mapping[str, str], folder: Path
) -> dict[str, _Given]:
    given = {}
    for name, value in environ.items():
        inner = name.removeprefix(PREFIX).lower()
        if not name.startswith(PREFIX) or not any(f"{inner}_".startswith(f"{top}_") for top in model.model_fields):
            continue
        path, origin = inner.replace("__", "."), f"environment {name}"
        _refuse_removed(path, value, origin, model.removed)
        # One spelling only: of two, the one that is read last would win.
        if path not in known or name != name.upper():
            close = path if path in known else closest(path, known)
            better = f"Did you mean {PREFIX}{close.replace('.', '__').upper()}? " if close else ""
            raise ConfigurationError(f"{name} in the environment is not a setting.", better + _INJECTED)
        given[path] = _Given(_scalar(path, known[path], value, origin), origin, folder)
    return given


def _from_flags(flags: Mapping[str, object], known_flags: Flags) -> dict[str, _Given]:
    return {
        path: _Given(value, f"flag --{name}", Path.cwd())
        for name, given in flags.items()
        if given is not None
        for path, value in known_flags[name](str(given)).items()
    }


def _scalar(path: str, field: FieldInfo, value: str, origin: str) -> object:
    """A value of the environment: text as it is, everything else as YAML."""
    accepted = list(kinds(field.annotation))
    if type(None) in accepted and value in ("", "null"):
        return None
    if any(kind in (str, Path) or get_origin(kind) is Literal for kind in accepted):
        return value
    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(f"{path} = {value!r} ({origin}) cannot be read.", help_text(field)) from error


def _has_place(field: FieldInfo) -> bool:
    return extra(field, "place") is True and field.default not in (None, PydanticUndefined)


def _placed(path: str, field: FieldInfo, given: _Given) -> object:
    if not extra(field, "place") or not isinstance(given.value, str | Path):
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


def _values(section: Section, prefix: str) -> Iterator[tuple[str, object]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
