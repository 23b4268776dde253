"""``tms topic``, ``tms publish`` and ``tms poll``, against a server."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import shell_complete

from tests.builders import DAY, MINUTE, NOW_MS
from tests.kit.client import payloads
from tests.server.process import IN_MEMORY
from tms_core.cli import messages, topics
from tms_core.cli.main import cli, execute
from tms_core.client import Client, NotInProgress, ProducerFenced
from tms_core.clock import Clock, ManualClock
from tms_core.messaging.groups import positions as consumers
from tms_core.rowkey import MessageId
from tms_core.server import companions
from tms_core.server.auth.tokens import new_token, token_line
from tms_core.server.companions import CompanionContext
from tms_core.server.serving import RunningServer, serving
from tms_core.topic import TopicId


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    # Rolled back messages are delivered again at once.
    environ = IN_MEMORY | {"TMS_SERVER__CONSUMERS__RETRY_SECONDS": "0"}
    with serving(None, environ, {}, janitor=False) as started:
        yield started


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    assert server.transactions is not None
    with Client(server.url, transactions=server.transactions) as client:
        yield client


@pytest.fixture
def topic(client: Client, request: pytest.FixtureRequest) -> str:
    name = f"default:t{abs(hash(request.node.nodeid))}"
    client.create_topic(name)
    return name


@pytest.fixture
def here(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_URL", server.url)
    monkeypatch.setenv("TMS_TRANSACTIONS__THRIFT", str(server.transactions))


class Type:
    """A function that runs ``tms``; returns the exit code, the output and the errors.

    Attributes:
        client: a client of the server.
        topic: the topic of the test.
    """

    def __init__(self, client: Client, topic: str, capture: pytest.CaptureFixture[bytes]) -> None:
        self.client, self.topic, self._capture = client, topic, capture

    def __call__(self, *words: object, given: bytes = b"") -> tuple[int, str, str]:
        with io.TextIOWrapper(io.BytesIO(given)) as typed_in, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", typed_in)
            code = execute([str(word) for word in words])
        out, err = self._capture.readouterr()
        return code, out.decode(errors="surrogateescape"), err.decode()


@pytest.fixture
def typed(
    request: pytest.FixtureRequest, client: Client, topic: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> Type:
    request.getfixturevalue("here")
    return Type(client, topic, capfdbinary)


@contextmanager
def own_server(monkeypatch: pytest.MonkeyPatch, clock: Clock, *, janitor: bool = False) -> Iterator[Client]:
    """Run a server with a topic, to which commands connect; yield a client."""
    with serving(None, IN_MEMORY, {}, janitor=janitor, clock=clock) as started, Client(started.url) as client:
        monkeypatch.setenv("TMS_URL", started.url)
        monkeypatch.setenv("TMS_TRANSACTIONS__THRIFT", str(started.transactions))
        client.create_topic("default:orders", ttl=604_800)
        yield client


# --- topics ----------------------------------------------------------------------------------------------------------


def test_topic_commands_make_list_change_and_delete(typed: Type) -> None:
    shown = "shop:orders: messages live 7 d, generation 1\n  owner = billing\n"
    assert typed("topic", "create", "shop:orders", "--ttl", "7d", "--property", "owner=billing") == (0, shown, "")
    assert typed("topic", "list", "shop")[:2] == (0, "shop:orders\n")
    code, out, _ = typed("topic", "update", "shop:orders", "--ttl", "90m", "--format", "json")
    properties = {"generation": "1", "owner": "billing", "ttl": "5400"}
    hidden = {"messages": 0, "older": 0, "at_least": False, "hold_seconds": None}
    assert (code, json.loads(out)) == (0, {"topic": "shop:orders", "properties": properties, "hidden": hidden})
    assert typed("topic", "show", "shop:orders")[1].startswith("shop:orders: messages live 1 h 30 min, generation")
    assert "  retention = consumed\n" in typed("topic", "update", "shop:orders", "--retention", "consumed")[1]
    assert "  retention = ttl\n" in typed("topic", "update", "shop:orders", "--retention", "ttl")[1]
    assert typed("topic", "delete", "shop:orders", "--yes")[:2] == (0, "shop:orders is deleted\n")
    assert typed("topic", "list", "shop", "--format", "json")[:2] == (0, "[]\n")


def test_publish_with_a_key_uses_one_partition(typed: Type) -> None:
    assert "partitions = 2" in typed("topic", "create", "keyed:visits", "--partitions", "2")[1]
    typed("publish", "keyed:visits", "--key", "user-7", "-m", "1", "-m", "2")
    at = zlib.crc32(b"user-7") % 2
    assert payloads(typed.client, f"keyed:visits-{at}") == [b"1", b"2"]
    assert "1:2:" in typed("topic", "update", "keyed:visits", "--partitions", "3")[1]
    typed("publish", "keyed:visits", "--transaction", "--key", "user-7", "-m", "3")
    assert payloads(typed.client, f"keyed:visits-f2-{zlib.crc32(b'user-7') % 3}") == [b"3"]
    typed("topic", "delete", "keyed:visits", "--yes")
    assert typed.client.topics("keyed") == []


def test_topic_delete_declined_by_the_user_keeps_the_topic(typed: Type) -> None:
    code, _, err = typed("topic", "delete", typed.topic, given=b"n\n")
    assert code != 0
    assert "all its messages" in err
    assert typed.client.topic(typed.topic).generation == 1


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["topic", "create", "orders"], 2, "write namespace:topic"),
        (["topic", "create", "default:x", "--ttl", "soon"], 2, "use 7d"),
        (["topic", "create", "default:x", "--ttl", "1500ms"], 2, "use 7d"),
        (["topic", "create", "default:x", "--property", "owner"], 2, "NAME=VALUE"),
        (["topic", "create", "default:x", "--retention", "read"], 2, "consumed"),
        (["topic", "list", "--server", "here"], 2, "http://127.0.0.1:11015"),
        (["topic", "list", "--ca-file", "nowhere.pem"], 2, "--ca-file"),
        (["topic", "list", "--token-file", "nowhere"], 2, "token file"),
        (["poll", "default:x", "--from", "12"], 2, "40 hex digits"),
        (["poll", "default:x", "--since", "soon"], 2, "soon"),
        (["poll", "default:x", "--since", "9999999999999999999"], 2, "invalid time"),
        (["poll", "default:x", "--since", "253402300800000"], 2, "invalid time"),
        (["poll", "default:x", "--since", "bla"], 2, "use 10m (ago), 2023-11-14T22:13:20Z"),
        (["topic", "update", "default:x", "--ttl", "0"], 2, "of at least 1 s"),
        (["poll", "default:x", "--since", "9999-12-31T23:59:59-10:00"], 2, "invalid time"),
        (["poll", "default:x", "--since", "now+3000000d"], 2, "invalid time"),
        (["poll", "default:x", "--since", "999999999999999999d"], 2, "invalid time"),
        (["consumer", "set", "default:x", "billing", "--since", "9999999999999999999"], 2, "invalid time"),
        (["poll", "default:x", "--since", "10m", "--consumer", "billing"], 2, "exclude"),
        (["poll", "default:nowhere", "--consumer", "billing"], 1, "nowhere"),
        (["consumer", "list", "default"], 2, "NAMESPACE:TOPIC"),
        (["consumer", "list", "*:orders"], 2, "NAMESPACE:TOPIC"),
        (["consumer", "set", "default:x", "billing"], 2, "--to ID or --since TIME"),
        (["topic", "list", "--server", "http://127.0.0.1:9"], 1, "tms serve"),
    ],
)
def test_failing_command_exits_with_its_code_and_reason(typed: Type, words: list[str], code: int, says: str) -> None:
    done, out, err = typed(*words)
    assert (done, out) == (code, "")
    assert says in err


def test_invalid_url_of_a_server_is_named_with_its_source(typed: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_URL", "here")
    for words, source in ((["topic", "list"], "TMS_URL"), (["topic", "list", "--server", "there"], "--server")):
        code, _, err = typed(*words)
        assert (code, err.startswith(f"error: {source}: ")) == (2, True)


# --- publish ---------------------------------------------------------------------------------------------------------


def test_publish_of_lines_sends_a_message_per_line_of_any_bytes(typed: Type, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"one\n\n\xff\x00three\r\nlast")
    assert typed("publish", typed.topic, file)[:2] == (0, f"4 published to {typed.topic}\n")
    assert payloads(typed.client, typed.topic) == [b"one", b"", b"\xff\x00three\r", b"last"]


def test_publish_of_a_large_file_sends_every_line_once_in_order(typed: Type, tmp_path: Path) -> None:
    lines = [f"{number} {'x' * (number % 700)}".encode() for number in range(9_000)]
    file = tmp_path / "lines"
    file.write_bytes(b"\n".join(lines) + b"\n")
    assert typed("publish", typed.topic, file, "--format", "json")[:2] == (0, '{\n "published": 9000\n}\n')
    assert payloads(typed.client, typed.topic) == lines


@pytest.mark.usefixtures("here")
def test_publish_from_an_open_pipe_does_not_wait(topic: str, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, seen = iter([b"first\nhal", b"f\n", b""]), []

    class Pipe(io.RawIOBase):
        """A pipe that records the published messages at each read."""

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            seen.append(payloads(client, topic))
            step = next(steps)
            buffer[: len(step)] = step
            return len(step)

    with io.TextIOWrapper(io.BufferedReader(Pipe())) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert execute(["publish", topic]) == 0
    assert seen == [[], [b"first"], [b"first", b"half"]]


def test_publish_of_binary_input_sends_one_message(typed: Type) -> None:
    assert typed("publish", typed.topic, "--binary", given=b"\x00\n\xff\n")[0] == 0
    assert payloads(typed.client, typed.topic) == [b"\x00\n\xff\n"]


def test_publish_of_endless_binary_input_names_the_limit(typed: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_MAX_BINARY_BYTES", 1 << 20)
    assert typed("publish", typed.topic, "--binary", given=bytes(1 << 20))[0] == 0
    code, _, err = typed("publish", typed.topic, "/dev/zero", "--binary")
    assert (code, " 1 MB" in err) == (2, True)


@pytest.mark.parametrize("options", [[], ["--transaction"]])
def test_publish_of_nothing_to_a_missing_topic_fails(typed: Type, options: list[str]) -> None:
    code, _, error = typed("publish", "default:missing", *options)
    assert (code, "default:missing does not exist" in error) == (1, True)
    code, output, _ = typed("publish", typed.topic, *options)
    assert (code, output) == (0, f"0 published to {typed.topic}\n")


def test_publish_that_fails_half_way_in_a_transaction_shows_nothing(typed: Type, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"one\ntwo\n" + b"x" * (9 << 20))
    code, _, err = typed("publish", typed.topic, file, "--transaction")
    assert code == 2
    assert "--binary" in err
    assert typed("poll", typed.topic, "--committed")[:2] == (0, "")
    assert typed("publish", typed.topic, "--transaction", given=b"three\n")[0] == 0
    assert typed("poll", typed.topic, "--committed", "--raw")[:2] == (0, "three\n")


@pytest.mark.parametrize("words", [(), ("--transaction",)], ids=["plain", "transaction"])
def test_publish_with_a_ttl_applies_it_only_to_its_messages(
    typed: Type, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    clock = ManualClock(NOW_MS)
    with own_server(monkeypatch, clock) as client:
        assert typed("publish", "default:orders", "-m", "short", "--ttl", "1m", *words)[0] == 0
        assert typed("publish", "default:orders", "-m", "long", *words)[0] == 0
        clock.advance(60_000)
        assert payloads(client, "default:orders") == [b"short", b"long"]
        clock.advance(1)
        assert payloads(client, "default:orders") == [b"long"]


class FakeJanitor:
    """A companion with the hold of a janitor."""

    hold_seconds: int | None = None

    def __init__(self, _: CompanionContext) -> None:
        """Do nothing: the context is not used."""

    def stop(self) -> None:
        """Do nothing: nothing runs."""


@pytest.mark.parametrize(
    ("hold_seconds", "message"),
    [
        (0, "janitor.hold_seconds is 0."),
        (None, "the time in janitor.hold_seconds."),
        (7200, "2 h from its next run: until about 2026-11-23 12:00:00 UTC."),
    ],
)
def test_topic_update_with_a_shorter_ttl_reports_hidden_messages(
    typed: Type, monkeypatch: pytest.MonkeyPatch, hold_seconds: int | None, message: str
) -> None:
    ten = int(datetime(2026, 11, 23, 10, tzinfo=UTC).timestamp() * 1000)
    monkeypatch.setattr(topics, "SystemClock", lambda: ManualClock(ten))
    monkeypatch.setattr(
        companions, "find_entry_points", lambda: [EntryPoint("janitor", f"{__name__}:FakeJanitor", companions.GROUP)]
    )
    monkeypatch.setattr(FakeJanitor, "hold_seconds", hold_seconds)
    clock = ManualClock(NOW_MS)
    with own_server(monkeypatch, clock, janitor=True) as client:
        client.publish("default:orders", [b"one", b"two"])
        clock.advance(61_000)
        client.publish("default:orders", [b"three"])
        code, out, err = typed("topic", "update", "default:orders", "--ttl", "1m")
        [older] = out.splitlines()[1:]
        assert (code, older.startswith("  2 of 3 messages ")) == (0, True)
        assert err.splitlines()[0].endswith(f" {message}")
        commands = re.findall(r": +((?:tms|janitor) .+)", err)
        keep = "tms topic update default:orders --ttl 604800"
        ways = ["janitor topic default:orders", keep, "janitor approve default:orders"]
        assert commands == (ways if hold_seconds != 0 else [keep])
        assert typed(*keep.split()[1:])[1:] == ("default:orders: messages live 7 d, generation 1\n", "")
        assert payloads(client, "default:orders") == [b"one", b"two", b"three"]
        url = os.environ["TMS_URL"]
        monkeypatch.delenv("TMS_URL")
        err = typed("topic", "update", "default:orders", "--server", url, "--ttl", "1m")[2]
        assert f"{keep} --server {url}" in err.splitlines()[-2 if hold_seconds != 0 else -1]


def test_publish_of_a_file_that_fails_shows_how_many_were_published(typed: Type) -> None:
    code, _, err = typed("publish", typed.topic, given=(b"x" * 99 + b"\n") * 20_000 + b"x" * (9 << 20))
    assert code == 2
    assert "line 20001" in err
    assert len(payloads(typed.client, typed.topic)) == 20_000


# --- poll ------------------------------------------------------------------------------------------------------------


def test_poll_prints_a_line_per_message_with_time_and_id(typed: Type) -> None:
    typed("publish", typed.topic, given="one\nzwölf\n".encode())
    code, out, _ = typed("poll", typed.topic)
    assert code == 0
    assert re.fullmatch(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC  [0-9a-f]{40}  (one|zwölf)\n){2}", out)


def test_poll_escapes_terminal_commands_unless_raw(typed: Type) -> None:
    typed.client.publish(typed.topic, [b"\x1b[2Jgone\n\xff"])
    assert typed("poll", typed.topic)[1].endswith("  \\x1b[2Jgone\\n\\xff\n")
    assert typed("poll", typed.topic, "--raw")[1] == "\x1b[2Jgone\n\udcff\n"


def test_poll_as_json_prints_objects_and_base64(typed: Type) -> None:
    typed.client.publish(typed.topic, ["höher".encode(), b"\xff\xfe"])
    code, out, _ = typed("poll", typed.topic, "--format", "json")
    messages = list(typed.client.poll(typed.topic))
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == [
        {"id": str(messages[0].id), "time_ms": messages[0].id.publish_ms, "payload": "höher"},
        {"id": str(messages[1].id), "time_ms": messages[1].id.publish_ms, "payload": {"base64": "//4="}},
    ]


def test_poll_from_a_position_or_time_starts_there(typed: Type) -> None:
    typed.client.publish(typed.topic, [b"one", b"two", b"three"])
    ids = [str(message.id) for message in typed.client.poll(typed.topic)]

    def read(*words: str) -> list[str]:
        code, out, _ = typed("poll", typed.topic, "--raw", *words)
        assert code == 0
        return out.split()

    assert read("--from", ids[1]) == ["two", "three"]
    assert read("--after", ids[1]) == ["three"]
    assert read("-n", "2") == ["one", "two"]
    assert read("--since", "1h") == ["one", "two", "three"]
    assert read("--since", "now+1h") == []
    assert read("--since", "2023-11-14T22:13:20Z", "-n", "1") == ["one"]
    assert read("--after", "1h") == ["one", "two", "three"]
    assert typed("poll", typed.topic, "--after", "then")[0] == 2


@pytest.mark.parametrize("words", [(), ("-f", "-n", "1")], ids=["once", "follow"])
def test_poll_after_a_time_excludes_its_millisecond(
    typed: Type, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    clock = ManualClock(NOW_MS)
    with own_server(monkeypatch, clock) as client:
        client.publish("default:orders", [b"one"])
        clock.advance(1)
        client.publish("default:orders", [b"two"])
        assert typed("poll", "default:orders", "--raw", "--since", NOW_MS, "-n", "1")[1] == "one\n"
        assert typed("poll", "default:orders", "--raw", "--after", NOW_MS, *words)[1] == "two\n"


def test_poll_with_commit_continues_after_the_printed_messages(typed: Type) -> None:
    typed.client.publish(typed.topic, [b"a", b"b", b"c"])
    typed.client.set_position(typed.topic, "billing", MessageId(0, 0))
    assert typed("poll", typed.topic, "--consumer", "billing", "--commit", "-n", "2", "--raw") == (0, "a\nb\n", "")
    assert typed("poll", typed.topic, "--consumer", "billing", "--commit", "--raw") == (0, "c\n", "")
    at_the_end = typed.client.position(typed.topic, "billing")
    assert typed("poll", typed.topic, "--consumer", "billing", "--commit", "--raw") == (0, "", "")
    assert typed.client.position(typed.topic, "billing") == at_the_end
    refused = typed("poll", typed.topic, "--commit")
    assert (refused[0], "--consumer" in refused[2]) == (2, True)


@pytest.mark.parametrize(("behind_ms", "named"), [(4 * MINUTE, False), (DAY, True)])
def test_topic_show_names_messages_dated_ahead_and_the_way_out(
    typed: Type, monkeypatch: pytest.MonkeyPatch, behind_ms: int, named: bool
) -> None:
    typed.client.publish(typed.topic, [b"a", b"b"])
    first = next(iter(typed.client.poll(typed.topic))).id.publish_ms
    monkeypatch.setattr(topics, "SystemClock", lambda: ManualClock(first - behind_ms))
    code, out, _ = typed("topic", "show", typed.topic)
    assert (code, "ahead" in out, f"tms topic delete {typed.topic}" in out) == (0, named, named)
    shown = json.loads(typed("topic", "show", typed.topic, "--format", "json")[1])
    assert shown.get("ahead_ms") == (first if named else None)


def test_topic_commands_with_count_show_the_number_of_messages(typed: Type) -> None:
    typed.client.publish(typed.topic, [b"a", b"b", b"c"])
    assert typed("topic", "show", typed.topic, "--count")[1].endswith("  3 messages\n")
    assert {"topic": typed.topic, "messages": 3} in json.loads(typed("topic", "list", "--count", "--format", "json")[1])
    assert [typed.topic, "3"] in [line.split() for line in typed("topic", "list", "--count")[1].splitlines()]


@pytest.mark.usefixtures("here")
def test_poll_with_a_closed_output_pipe_exits_1_without_error(topic: str, client: Client) -> None:
    client.publish(topic, [b"x" * 1000] * 500)
    program = [sys.executable, "-c", "from tms_core.cli.main import main; main()", "poll", topic]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.usefixtures("here")
def test_poll_with_follow_prints_messages_as_they_come(topic: str, client: Client) -> None:
    client.publish(topic, [b"one"])

    class Screen(io.StringIO):
        """A screen that publishes another message after each line."""

        def flush(self) -> None:
            shown = self.getvalue().count("\n")
            if shown < 3:
                client.publish(topic, [b"more"])

    screen = Screen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        assert execute(["poll", topic, "--follow", "--limit", "3"]) == 0
    assert [line.split()[-1] for line in screen.getvalue().splitlines()] == ["one", "more", "more"]


# --- producers -------------------------------------------------------------------------------------------------------


def test_producer_commands_list_fence_and_delete(typed: Type) -> None:
    assert typed("producer", "list", typed.topic)[1].startswith(f"no topic that matches {typed.topic} ")
    assert typed("producer", "fence", typed.topic, "importer")[0] == 1
    with typed.client.producer(typed.topic, "importer") as producer:
        with producer.transaction("file 17") as tx:
            tx.publish(typed.topic, [b"a"])
        committed = tx.transaction.transaction_id
        left = producer.transaction("file 18").__enter__()
        left.publish(typed.topic, [b"b" * 5_000_000])
        pointer, generation = str(left.transaction.transaction_id), producer.generation
        code, out, _ = typed("producer", "list", typed.topic)
        assert (code, out.splitlines()[1].split()[:3]) == (0, [typed.topic, "importer", str(generation)])
        [shown] = json.loads(typed("producer", "list", typed.topic, "--format", "json")[1])
        assert shown == json.loads(typed("producer", "show", typed.topic, "importer", "--format", "json")[1])
        assert (shown["previous"], shown["open"]) == (None, {pointer: "file 18"})
        assert pointer in typed("producer", "show", typed.topic, "importer")[1]

        code, out, _ = typed("producer", "fence", typed.topic, "importer")
        assert code == 0
        assert out == (
            f"instances of importer before generation {generation + 1} are fenced; "
            f"the last transaction: {committed} (file 17) committed\n"
        )
        with pytest.raises(ProducerFenced):
            producer.publish([b"late"])
    assert "(file 17) committed" in typed("producer", "show", typed.topic, "importer")[1]
    done = f"producer importer of {typed.topic} is deleted\n"
    assert typed("producer", "delete", typed.topic, "importer")[:2] == (0, done)
    assert typed("producer", "show", typed.topic, "importer")[0] == 1
    with typed.client.transaction() as tx:
        assert [message.payload for message in tx.poll(typed.topic)] == [b"a"]


# --- consumers -------------------------------------------------------------------------------------------------------


def test_consumer_list_shows_unread_messages_and_moves_no_position(typed: Type) -> None:
    typed.client.publish(typed.topic, [b"one", b"two", b"three"])
    first, _, last = typed.client.poll(typed.topic)
    typed.client.set_position(typed.topic, "billing", first.id)
    typed.client.set_position(typed.topic, "audit", last.id)
    for _ in range(2):
        code, out, _ = typed("consumer", "list", typed.topic)
        assert code == 0
        head, audit, billing = out.splitlines()
        assert head.split()[:3] == ["topic", "consumer", "lag"]
        assert audit.split()[:3] == [typed.topic, "audit", "0"]
        assert billing.split()[:3] == [typed.topic, "billing", "2"]
        assert "ago" in billing
        assert "ago" not in audit
    code, out, _ = typed("consumer", "list", "--format", "json")
    found = {(one["topic"], one["name"]): one for one in json.loads(out)}
    assert found[typed.topic, "billing"]["position"] == str(first.id)
    assert (found[typed.topic, "billing"]["lag_messages"], found[typed.topic, "billing"]["expired"]) == (2, False)
    assert found[typed.topic, "audit"]["lag_seconds"] == 0


@pytest.mark.parametrize("since", ["253402300799999", "9999-12-31T23:59:59.999Z", "now+2000000d"])
def test_poll_from_the_latest_calendar_time_reads_nothing(typed: Type, since: str) -> None:
    typed.client.publish(typed.topic, [b"one"])
    assert typed("poll", typed.topic, "--since", since) == (0, "", "")
    assert typed("consumer", "set", typed.topic, "billing", "--since", since)[0] == 0
    assert typed("poll", typed.topic, "--consumer", "billing") == (0, "", "")


def test_consumer_list_counts_payloads_of_transactions(typed: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    typed.client.set_position(typed.topic, "billing", MessageId(0, 0))
    with typed.client.transaction() as transaction:
        typed.client.store(typed.topic, [b"one", b"two"], transaction=transaction.transaction)
        typed.client.publish(typed.topic, [], transaction=transaction.transaction)
    assert payloads(typed.client, typed.topic) == [b"one", b"two"]
    assert typed("consumer", "list", typed.topic)[1].splitlines()[1].split()[:3] == [typed.topic, "billing", "2"]
    # The number is not shown if the count was limited.
    monkeypatch.setattr(consumers, "COUNTED_ROWS", 2)
    assert typed("consumer", "list", typed.topic)[1].splitlines()[1].split()[:3] == [typed.topic, "billing", "many"]
    [found] = json.loads(typed("consumer", "list", typed.topic, "--format", "json")[1])
    assert (found["lag_messages"], found["lag_is_at_least"]) == (None, True)


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a server with three topics; the user may consume one topic, and only publish to the others."""
    tokens = {name: new_token() for name in ("root", "ada")}
    file = tmp_path / "tokens"
    file.write_text("".join(f"{token_line(name, token)}\n" for name, token in tokens.items()))
    rules = [
        {"principal": "root", "topics": ["*:*"], "can": ["admin", "publish", "consume"]},
        {"principal": "ada", "topics": ["default:*"], "can": ["publish"]},
        {"principal": "ada", "topics": ["default:orders"], "can": ["consume"]},
    ]
    auth = {"kind": "tokens", "tokens_file": str(file), "rules": rules}
    config = tmp_path / "tms.yaml"
    config.write_text(json.dumps({"storage": {"kind": "memory"}, "server": {"port": 0, "auth": auth}}))
    for name, token in tokens.items():
        (tmp_path / name).write_text(token)
    environ = {"TMS_TRANSACTIONS__THRIFT": "127.0.0.1:0"}
    with serving(config, environ, {}, janitor=False) as started:
        monkeypatch.setenv("TMS_URL", started.url)
        with Client(started.url, token_file=tmp_path / "root") as client:
            for name in ("bills", "orders", "salaries"):
                client.create_topic(f"default:{name}")
                client.set_position(f"default:{name}", "billing", MessageId(0, 0))
        yield


@pytest.mark.usefixtures("guarded")
def test_list_by_a_pattern_needs_permissions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def list_consumers(pattern: str) -> tuple[int, list[str], str]:
        code = execute(["consumer", "list", pattern, "--token-file", str(tmp_path / "ada")])
        out, err = capsys.readouterr()
        return code, [line.split()[0] for line in out.splitlines()[1:]], err.partition(":")[0]

    assert list_consumers("default:*") == (0, ["default:orders"], "2 topics were omitted")
    assert list_consumers("default:[os]*") == (0, ["default:orders"], "1 topic was omitted")
    assert list_consumers("default:order?") == (0, ["default:orders"], "")
    code = execute(["consumer", "list", "default:bills", "--token-file", str(tmp_path / "ada")])
    err = capsys.readouterr().err
    assert (code, "[TMS-FORBIDDEN]" in err, "omitted" in err) == (1, True, False)


def test_list_by_a_pattern_leaves_deleted_topics_out(typed: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    typed.client.set_position(typed.topic, "billing", MessageId(0, 0))
    names = Client.topics

    def list_with_deleted(self: Client, namespace: str) -> list[TopicId]:
        return [*names(self, namespace), TopicId.parse(f"{typed.topic}gone")]

    monkeypatch.setattr(Client, "topics", list_with_deleted)
    code, out, err = typed("consumer", "list", f"{typed.topic}*")
    assert (code, len(out.splitlines())) == (0, 2)
    assert err.startswith("1 topic was omitted")
    code, out, err = typed("consumer", "list", f"{typed.topic}gone")
    assert (code, out, "gone" in err) == (1, "", True)


@pytest.mark.parametrize("group", ["consumer", "producer"])
def test_list_of_a_missing_topic_fails_and_of_a_pattern_does_not(typed: Type, group: str) -> None:
    for pattern in ("default:nowhere", "nowhere:orders"):
        code, out, err = typed(group, "list", pattern)
        assert (code, out) == (1, "")
        assert f"Topic {pattern} does not exist. [TMS-TOPIC-NOT-FOUND]" in err
    for pattern in ("default:nowhere*", "nowhere:*"):
        assert typed(group, "list", pattern)[0] == 0


def test_producer_list_by_a_pattern_leaves_deleted_topics_out(typed: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    with typed.client.producer(typed.topic, "importer"):
        monkeypatch.setattr(Client, "topics", lambda *_: list(map(TopicId.parse, (typed.topic, f"{typed.topic}gone"))))
        code, out, err = typed("producer", "list", f"{typed.topic}*")
    assert (code, len(out.splitlines()), err.startswith("1 topic was omitted")) == (0, 2, True)


def test_consumer_commands_set_show_and_delete(typed: Type) -> None:
    typed.client.publish(typed.topic, [b"one", b"two"])
    first, _ = typed.client.poll(typed.topic)
    assert typed("consumer", "set", typed.topic, "billing", "--to", first.id)[0] == 0
    assert typed("consumer", "show", typed.topic, "billing")[1].startswith(f"{first.id}  published 20")
    assert typed("poll", typed.topic, "--raw", "--consumer", "billing")[1] == "two\n"
    assert typed("consumer", "set", typed.topic, "billing", "--since", "1h")[0] == 0
    assert typed("poll", typed.topic, "--raw", "--consumer", "billing")[1] == "one\ntwo\n"
    assert typed("consumer", "set", typed.topic, "billing", "--since", "now+1h")[0] == 0
    assert typed("poll", typed.topic, "--raw", "--consumer", "billing")[1] == ""
    assert typed("consumer", "delete", typed.topic, "billing")[0] == 0
    assert typed("consumer", "list", typed.topic)[1].startswith(f"no topic that matches {typed.topic} ")


def test_consumer_show_names_the_message_that_failed_and_how_often(typed: Type) -> None:
    typed.client.publish(typed.topic, [b"good", b"bad"])
    [good, bad] = typed.client.poll(typed.topic)
    for limit in (2, 1):
        with typed.client.transaction() as tx:
            assert len(list(tx.consume(typed.topic, "billing", limit=limit))) == limit
            tx.roll_back()
    shown = json.loads(typed("consumer", "show", typed.topic, "billing", "--format", "json")[1])
    start = str(MessageId(0, 0))
    alone = {"message": str(good.id), "after": start, "last": str(good.id), "deliveries": 2, "again": None}
    other = {"message": None, "after": str(good.id), "last": str(bad.id), "deliveries": 1, "again": None}
    assert shown["failed"] == [alone, other]
    lines = typed("consumer", "show", typed.topic, "billing")[1].splitlines()
    assert lines[1].split()[:2] == ["failed", "message"]
    assert lines[2].split() == [str(good.id), start, str(good.id), "2"]


def test_consumer_redrive_puts_dead_letters_back_once(typed: Type) -> None:
    typed.client.publish(typed.topic, [b"%d" % number for number in range(6)])
    for tx, _ in typed.client.work(typed.topic, "billing", max_deliveries=1, idle_seconds=1):
        tx.roll_back()
    dead = payloads(typed.client, f"{typed.topic}-dead")
    assert dead == [b"0", b"1", b"2", b"3", b"4", b"5"]

    def redrive(*more: str) -> int:
        code, out, _ = typed("consumer", "redrive", typed.topic, "--format", "json", *more)
        assert code == 0
        found: int = json.loads(out)["messages"]
        return found

    assert [redrive("--limit", "2"), redrive(), redrive()] == [2, 4, 0]
    with typed.client.transaction() as tx:
        assert [message.payload for message in tx.consume(typed.topic, "billing")] == dead
    typed.client.publish(f"{typed.topic}-dead", [b"6"])
    done = f"1 messages of {typed.topic}-dead were published to {typed.topic}\n"
    assert typed("consumer", "redrive", typed.topic)[:2] == (0, done)


def test_redrive_without_dead_letters_is_1_with_a_hint(typed: Type) -> None:
    code, _, err = typed("consumer", "redrive", typed.topic)
    assert (code, f"{typed.topic}-dead" in err, "[TMS-TOPIC-NOT-FOUND]" in err) == (1, True, True)
    assert "max_deliveries" in err


def test_release_of_an_open_claim_gives_its_messages_to_another(typed: Type) -> None:
    typed.client.publish(typed.topic, [b"one"])

    def hold_claim() -> None:
        with typed.client.transaction() as tx:
            list(tx.consume(typed.topic, "billing"))
            pointer = str(tx.transaction.transaction_id)
            assert pointer in typed("consumer", "show", typed.topic, "billing")[1]
            shown = json.loads(typed("consumer", "show", typed.topic, "billing", "--format", "json")[1])
            assert [claim["transaction"] for claim in shown["claims"]] == [pointer]
            for count in (1, 0):
                done = (0, f"{count} transactions of billing were invalidated\n")
                assert typed("consumer", "release", typed.topic, "billing")[:2] == done

    with pytest.raises(NotInProgress):
        hold_claim()
    with typed.client.transaction() as tx:
        assert [message.payload for message in tx.consume(typed.topic, "billing")] == [b"one"]
        assert typed("consumer", "set", typed.topic, "billing", "--since", "1h", "--force")[0] == 0
        tx.roll_back()
    assert typed("consumer", "delete", typed.topic, "billing", "--force")[0] == 0


# --- completion ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_of_a_shell_names_the_command(typed: Type, shell: str) -> None:
    code, out, _ = typed("completion", shell)
    assert code == 0
    assert "_TMS_COMPLETE" in out


def test_shell_completes_a_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COMP_WORDS", "tms p")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert shell_complete(cli, {}, "tms", "_TMS_COMPLETE", "bash_complete") == 0
    assert {line.partition(",")[2] for line in capsys.readouterr().out.splitlines()} == {"poll", "producer", "publish"}


def test_settings_file_of_the_environment_names_the_server(
    typed: Type, server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "tms.yaml"
    settings.write_text(f"server: {{port: {server.url.rpartition(':')[2]}}}\n", encoding="utf-8")
    monkeypatch.delenv("TMS_URL")
    monkeypatch.setenv("TMS_CONFIG", str(settings))
    assert typed("topic", "list")[0] == 0


def test_completion_of_a_topic_asks_the_server(
    topic: str,
    server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def complete(url: str, token_file: Path = tmp_path / "token") -> set[str]:
        monkeypatch.setenv("COMP_WORDS", f"tms topic show --server {url} --token-file {token_file} {topic[:-1]}")
        monkeypatch.setenv("COMP_CWORD", "7")
        assert shell_complete(cli, {}, "tms", "_TMS_COMPLETE", "bash_complete") == 0
        return {line.partition(",")[2] for line in capsys.readouterr().out.split()}

    (tmp_path / "token").write_text("token")
    assert topic in complete(server.url)
    assert all(name.startswith(topic[:-1]) for name in complete(server.url))
    assert complete("http://127.0.0.1:9") == set()
    for unusable in (tmp_path / "missing", Path("/dev/zero")):
        assert complete(server.url, unusable) == set()


def test_completion_script_of_bash_keeps_a_topic_in_one_word(typed: Type) -> None:
    assert "COMP_WORDBREAKS=${COMP_WORDBREAKS//:/}" in typed("completion", "bash")[1]
    assert "COMP_WORDBREAKS" not in typed("completion", "zsh")[1]


def test_deletion_of_a_missing_topic_hints_at_the_list_of_topics(typed: Type) -> None:
    code, _, err = typed("topic", "delete", "shop:missing", "--yes")
    assert (code, "[TMS-TOPIC-NOT-FOUND]" in err) == (1, True)
    assert re.search("hint: .*tms topic list shop;.* tms topic create shop:missing", err)
