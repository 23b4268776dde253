"""Commands that ``tms`` and its server print as hints: each runs unchanged."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import janitor
import tms_core
from tests.test_tms_messages import Type, client, here, server, topic, typed
from tms_core.cli.main import cli
from tms_core.client import Client
from tms_core.server.serving import RunningServer

__all__ = ["client", "here", "server", "topic", "typed"]

#: A command at the end of a line or of a sentence, after a colon.
_COMMAND = re.compile(r": +tms ([a-z][^\n;]*?)\.?(?=\n|$|, | \()", re.MULTILINE)


def hints(text: str) -> list[list[str]]:
    return [shlex.split(words) for words in _COMMAND.findall(text)]


def hint_of(typed: Type, *words: object) -> list[str]:
    """Run a command that fails; return the only command that its error names."""
    code, _, err = typed(*words)
    assert code != 0
    [hint] = hints(err)
    return hint


def test_missing_producer_hints_at_the_list(typed: Type, topic: str) -> None:
    words = hint_of(typed, "producer", "show", topic, "importer")
    assert words == ["producer", "list", topic]
    assert typed(*words)[0] == 0


def test_publish_to_a_missing_topic_hints_at_topic_create(typed: Type) -> None:
    words = hint_of(typed, "publish", "default:missing", "-m", "one")
    assert words == ["topic", "create", "default:missing"]
    assert typed(*words)[0] == 0
    assert typed("publish", "default:missing", "-m", "one")[0] == 0


def test_consumer_with_claims_hints_at_the_release(
    typed: Type, topic: str, client: Client, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.transactions is not None
    monkeypatch.setenv("TMS_TRANSACTIONS__THRIFT", server.transactions)
    client.publish(topic, [b"one"])
    hanging = client.transaction()
    assert list(hanging.__enter__().consume(topic, "billing"))
    words = hint_of(typed, "consumer", "set", topic, "billing", "--since", "now")
    assert words == ["consumer", "release", topic, "billing"]
    assert typed(*words)[0] == 0
    assert typed("consumer", "set", topic, "billing", "--since", "now")[0] == 0


def test_hint_of_a_command_with_server_repeats_the_server(
    typed: Type, topic: str, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMS_URL")
    words = hint_of(typed, "producer", "show", topic, "importer", "--server", server.url)
    assert words == ["producer", "list", topic, "--server", server.url]
    assert typed(*words)[0] == 0


@pytest.mark.parametrize("verb", ["abort --yes", "invalidate"])
def test_ended_transaction_hints_at_its_status(typed: Type, server: RunningServer, client: Client, verb: str) -> None:
    assert server.transactions is not None
    with client.transaction() as tx:
        ended = tx.transaction.transaction_id
    words = hint_of(typed, "tx", *verb.split(), ended, "--tx-server", server.transactions)
    assert typed(*words)[0] == 0


# --- completeness ----------------------------------------------------------------------------------------------------


def texts(package: Path) -> Iterator[str]:
    """Yield every text of a package, with ``X`` for values, and without code in docstrings."""
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                yield re.sub("``.*?``", "", node.value, flags=re.DOTALL)


def resolve_command(words: list[str]) -> click.Command:
    """Return the command that words name.

    Raises:
        KeyError: the command or one of its options does not exist.
    """
    found: click.Command = cli
    for word in words:
        if isinstance(found, click.Group):
            command = found.get_command(click.Context(found), word)
            if command is None:
                raise KeyError(word)
            found = command
    options = {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word.startswith("-") and word != "--no-X" and word not in options:
            raise KeyError(word)
    return found


def test_every_command_named_in_a_text_exists() -> None:
    named = (text for package in (tms_core, janitor) for folder in package.__path__ for text in texts(Path(folder)))
    found = [words for text in named for words in hints(text)]
    assert len(found) > 5
    for words in found:
        assert not isinstance(resolve_command(words), click.Group), words


@pytest.mark.parametrize("line", ["topics list", "topic list --shelf", "producer fnce X X"])
def test_check_of_commands_rejects_an_unknown_command(line: str) -> None:
    with pytest.raises(KeyError):
        resolve_command(line.split())
