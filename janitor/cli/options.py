"""Options that many verbs share, and the kinds of values they take."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from janitor.app.options import Common
from tms_core.cli.help import LOG_FORMAT, shared, together
from tms_core.errors import ConfigurationError
from tms_core.settings import CONFIG_ENV

if TYPE_CHECKING:
    from janitor.app.session import Session

Command = Callable[..., Any]

#: Commands that work until they are stopped; run with ``--once`` is not one of them.
_DAEMONS = ("run", "exporter")

#: Exit codes in addition to the common ones of both programs.
REFUSED, PARTLY = 3, 5


class PatternType(click.ParamType[str]):
    """A shell pattern on ``namespace:topic``."""

    name = "pattern"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if str(value).count(":") != 1:
            self.fail(f"invalid topic {value!r}: use namespace:topic, as in default:orders or 'default:*'", param, ctx)
        return str(value)


_COMMON = together(
    # An envvar of click would override a file that is given before the verb.
    shared("--config", type=click.Path(path_type=Path), metavar="FILE", env=CONFIG_ENV, help="Settings file (YAML)."),
    shared(
        "--leveldb",
        metavar="DIR",
        env="TMS_STORAGE__LEVELDB__PATH",
        shown="data/messaging",
        help="LevelDB store; its state is in DIR.janitor, its transactions in DIR.tx.",
    ),
    shared("--hbase", metavar="HOST:PORT[,…]", env="TMS_STORAGE__HBASE__THRIFT", help="HBase Thrift servers."),
    shared(
        "--snapshots",
        metavar="DIR|URL",
        env="TMS_TRANSACTIONS__DIRECTORY",
        help="Folder of the transaction snapshots.",
    ),
    shared(
        "--format",
        type=click.Choice(["table", "json"]),
        shown="table",
        help="Output format: table for reading, json for programs.",
    ),
    shared("--log-format", type=click.Choice(["auto", "text", "json"]), shown="auto", help=LOG_FORMAT),
    click.version_option(package_name="tms-janitor", prog_name="janitor"),
)


def common_options(command: Command) -> Command:
    """Add the options that every verb takes; the context stores them in :class:`Common`."""

    @wraps(command)
    def run_command(*args: Any, **options: Any) -> Any:
        context = click.get_current_context()
        common = cast(Common, context.ensure_object(dict).setdefault("common", Common()))
        for name in ("config", "leveldb", "hbase", "snapshots", "format", "log_format"):
            value = options.pop(name)
            if value is not None:
                setattr(common, name, value)
        return command(*args, **options)

    return _COMMON(run_command)


topic_patterns = click.option(
    "--topic", "patterns", type=PatternType(), multiple=True, help="Only these topics (shell pattern); repeatable."
)


def session() -> Session:
    """Return the session of the command that is running; call it once the options have been read.

    It imports the modules that commands work with, which help texts and completion do not need.
    """
    from janitor.app.session import Session  # noqa: PLC0415
    from tms_core.clock import SystemClock  # noqa: PLC0415
    from tms_core.logs.loggers import configure  # noqa: PLC0415

    found = cast(dict[str, Any], click.get_current_context().ensure_object(dict))
    common = cast(Common, found["common"])
    if common.config is None and (named := os.environ.get(CONFIG_ENV)):
        common.config = Path(named)
    _refuse_namesake()
    configure(common.log_format, sys.stderr, common.arguments(), daemon=_is_daemon())
    return Session(common, found.get("clock") or SystemClock())


def _is_daemon() -> bool:
    """Return whether this command works until it is stopped."""
    context = click.get_current_context()
    return context.info_name in _DAEMONS and not context.params.get("once")


def _refuse_namesake() -> None:
    """Refuse to work if pyjanitor is installed: its package ``janitor`` and this one overwrite each other."""
    from importlib import metadata  # noqa: PLC0415

    try:
        metadata.distribution("pyjanitor")
    except metadata.PackageNotFoundError:
        return
    raise ConfigurationError(
        "pyjanitor is installed in this environment, and its package is named janitor like this one.",
        "Install each of the two into a separate environment.",
    )
