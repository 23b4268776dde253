"""The pages about the client: each example runs against a server over sockets."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import serving
from tests.support import PATIENCE_SECONDS
from tms_core import client as package
from tms_core.client import AsyncClient, Client, MessagingError
from tms_core.client.protocol import calls
from tms_core.client.sync import DEFAULT_TRANSACTIONS, DEFAULT_URL
from tms_core.client.work import READS
from tms_core.clock import SystemClock
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage
from tms_core.transaction.rpc.service import TransactionService

DOCS = Path(__file__).parents[2] / "docs"
CLIENT = ("python-client.md", "transactions.md")
PAGE = "\n".join((DOCS / "how-to" / name).read_text(encoding="utf-8") for name in CLIENT)
#: The topics that a page says to create.
CREATED = re.compile(r"^tms topic create (\S+)$", re.MULTILINE)
#: The examples of these pages, each with the topics of its page, or of the page on which a reader starts.
EXAMPLES = [
    pytest.param(code, CREATED.findall(page) or CREATED.findall(PAGE), id=f"{name}-{number}")
    for name in (*CLIENT, "consumer-groups.md", "exactly-once.md", "../tutorials/messaging-server.md")
    for page in [(DOCS / "how-to" / name).read_text(encoding="utf-8")]
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL))
]


@pytest.fixture
def addresses() -> Iterator[dict[str, str]]:
    """Return the addresses of a server and a transaction service by their addresses in the page."""
    with serving() as server, TransactionManager(MemoryStorage(), SystemClock()) as manager:
        service = TransactionService(manager, "127.0.0.1:0")
        service.start()
        url = f"http://127.0.0.1:{server.port}"
        yield {DEFAULT_URL: url, DEFAULT_TRANSACTIONS: service.address}
        service.stop()


@pytest.mark.parametrize(("code", "topics"), EXAMPLES)
def test_example_of_a_page_runs_with_the_topics_of_the_page(
    code: str, topics: list[str], addresses: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(addresses[DEFAULT_URL]) as client:
        for topic in topics:
            client.create_topic(topic)
    for stated, real in addresses.items():
        code = code.replace(stated, real)
    for kind in (Client, AsyncClient):
        defaults = {**(kind.__init__.__kwdefaults__ or {}), "transactions": addresses[DEFAULT_TRANSACTIONS]}
        monkeypatch.setattr(kind.__init__, "__kwdefaults__", defaults)
    file = tmp_path / "example.py"
    file.write_text(code, encoding="utf-8")
    runpy.run_path(str(file), run_name="__main__")
    clients = [thread for thread in threading.enumerate() if thread.name.startswith(("tms-", "in-process"))]
    for thread in clients:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("code", [400, 401, 403, 404, 409, 413, 500, 503])
def test_code_raises_the_error_of_the_page(code: int) -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    [named] = [re.findall(r"`(\w+)`", cells[0]) for cells in rows if str(code) in cells[1]]
    with pytest.raises(MessagingError) as caught:
        calls.check(calls.delete_topic("default:orders"), code, b"", {})
    assert type(caught.value).__name__ in named


def test_every_error_and_value_that_the_page_names_is_exported() -> None:
    named = set(re.findall(r"`([A-Z][a-z]+\w*)(?:\(.*?\))?`", PAGE)) - {"HOST"}
    assert named - set(package.__all__) == set()


def parameters(name: str) -> set[str]:
    """Return the parameters of all client methods with this name."""
    owners = (package, Client, package.Producer, package.TransactionContext)
    found = [getattr(owner, name, None) for owner in owners]
    return {parameter for one in found if callable(one) for parameter in inspect.signature(one).parameters}


def calls_of_the_client(text: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls with keywords in the sentences of a page that have the name of a method of the client."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for code, name in re.findall(r"(?<!`)`((?:\w+\.)*(\w+)\([^`\n]*=[^`\n]*\))`(?!`)", prose):
        if parameters(name):
            call = ast.parse(code.replace("…", "..."), mode="eval").body
            assert isinstance(call, ast.Call), code
            yield name, call


def test_every_argument_in_a_sentence_of_a_page_exists() -> None:
    paths = {*DOCS.parent.glob("*.md"), *DOCS.rglob("*.md")} - {DOCS / "reference/api.md"}  # signatures, and not calls
    pages = [path.read_text(encoding="utf-8") for path in sorted(paths)]
    named = [call for page in pages for call in calls_of_the_client(page)]
    assert len(named) > 5
    for name, call in named:
        for argument in call.keywords:
            assert argument.arg in parameters(name), ast.unparse(call)
            if argument.arg == "read":
                assert ast.literal_eval(argument.value) in (*READS, ...), ast.unparse(call)
