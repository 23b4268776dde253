"""Error texts for a setting that is wrong: which one, where it came from, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tms_core.errors import ConfigurationError
from tms_core.settings.fields import DEFAULT, Section, fields, text


def explained(
    errors: Iterable[ErrorDetails], known: Mapping[str, FieldInfo], origins: Mapping[str, str]
) -> ConfigurationError:
    """One error of ours out of pydantic's.

    Args:
        known: every setting by its path.
        origins: by path, where values came from.
    """
    problems, hint = [], ""
    paths: list[str] = []
    for error in errors:
        path = _path(error)
        if error["type"] == "too_short" and any(wrong.startswith(f"{path}[") for wrong in paths):
            continue  # it has become too short by the entries that are wrong
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
                problems.append(f"{path} = {shown(error['input'])} ({origin}): {_problem(error)}")
        hint = hint or (help_text(known[setting]) if setting in known else "")
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


def shown(value: object) -> str:
    """A wrong value, of whatever kind and size, for a message."""
    return repr(value)[:200]


def help_text(field: FieldInfo) -> str:
    """The meaning of a setting, and its default as an example of what to write."""
    default = "" if field.is_required() else f"; default: {text(field.default)}"
    return f"Meaning: {field.description}{default}."


def meant(path: str, model: type[Section], prefix: str) -> str:
    """The setting that was probably meant by an unknown one in this section, else those there are."""
    names = [f"{prefix}{name}" for name in model.model_fields]
    inside = [f"{prefix}{name}" for name, _ in fields(model)]
    close = closest(path, [*names, *inside])
    return f"Did you mean {close}?" if close else f"There are: {', '.join(names)}."


def closest(path: str, known: Iterable[str]) -> str | None:
    """The setting that was probably meant: one written with the wrong separator, or nearly alike in its last part."""
    for name in known:
        if name.replace(".", "_") == path.replace(".", "_"):
            return name
    last = path.rpartition(".")[2]
    alike = difflib.get_close_matches(path, known, n=5, cutoff=0.6)
    return next((name for name in alike if difflib.get_close_matches(last, [name.rpartition(".")[2]])), None)
