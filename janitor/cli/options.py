"""Options that many verbs share, and their types."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from janitor.app.options import Common
from tms_core.cli.help import LOG_FORMAT, combine_options, shared
from tms_core.errors import ConfigurationError
from tms_core.settings import CONFIG_ENV

if TYPE_CHECKING:
    from janitor.app.session import Session

Command = Callable[..., Any]

#: Commands that run until they are stopped; except run with ``--once``.
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


_COMMON = combine_options(
    # Not with an envvar of click, which would override a file that is given before the verb.
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
    """Add the options of every verb; the context stores them in :class:`Common`."""

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
    "--topic",
    "patterns",
    type=PatternType(),
    metavar="NS:PATTERN",
    multiple=True,
    help="Only these topics (shell pattern); repeatable.",
)


def session() -> Session:
    """Return the session of the current command; call this after the options were parsed.

    The imports are here, because help texts and completion do not need these modules.
    """
    from janitor.app.session import Session  # noqa: PLC0415
    from tms_core.clock import SystemClock  # noqa: PLC0415
    from tms_core.logs.loggers import configure  # noqa: PLC0415

    found = cast(dict[str, Any], click.get_current_context().ensure_object(dict))
    common = cast(Common, found["common"])
    if common.config is None and (named := os.environ.get(CONFIG_ENV)):
        common.config = Path(named)
    _reject_pyjanitor()
    configure(common.log_format, sys.stderr, common.arguments(), daemon=_is_daemon())
    return Session(common, found.get("clock") or SystemClock())


def _is_daemon() -> bool:
    """Return whether the current command runs until it is stopped."""
    context = click.get_current_context()
    return context.info_name in _DAEMONS and not context.params.get("once")


def _reject_pyjanitor() -> None:
    """Raise an error if pyjanitor is installed: its package ``janitor`` and this package overwrite each other."""
    from importlib import metadata  # noqa: PLC0415

    try:
        metadata.distribution("pyjanitor")
    except metadata.PackageNotFoundError:
        return
    raise ConfigurationError(
        "pyjanitor is installed in this environment, and its package is also named janitor.",
        "Install pyjanitor and tms-janitor in separate environments.",
    )
