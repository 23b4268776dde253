"""P20: the gain of a second server on one HBase, and a model of the rate on 10 and on 100 nodes.

The benchmark measures one server with 16 slots, and two servers that share the slots, on one HBase. A proxy delays each
response of HBase by 20 ms, so that the wait for HBase limits the servers, and not the processors that all processes
share. Each publisher has a topic, publishes some messages and reads them back. Each server has one connection to HBase
(the default is 4), there are no transactions, and each rate is the best of some turns.

The model needs two rates, measured without the proxy:

* **node rate**: the events that a group produces *and* consumes in transactions through one server on HBase, in batches
  of 500 × 1 KB, divided by the server's processor time in seconds. A node is therefore a machine with one processor for
  ``tms serve``, and with other processors for HBase, producers and consumers.
* **tx/s**: the transactions that concurrent clients start and commit per second, by the clock, through one transaction
  service with a synced log.

Each batch needs two transactions, one to produce it and one to consume it. Therefore *n* nodes process
min(n × node rate, tx/s × batch ÷ 2) events per second. ``python -m benchmarks.p20_slots --page`` writes the figures and
the arithmetic into ``docs/explanation/scale.md``.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.queues import Queue
from pathlib import Path
from threading import Event
from typing import NamedTuple

import yaml

from benchmarks.figure import Figure, report
from benchmarks.hbase import server as hbase_server
from benchmarks.p14_groups import open_client
from benchmarks.p23_idle import processor_seconds
from tests.hbase.tables import Tables
from tests.kit.proxy import Conduct, Proxy
from tests.server.client import Client, TopicClient
from tests.server.process import Serve, configure
from tests.support import size
from tms_core.transaction.rpc.client import TransactionClient

SLOTS, DELAY_SECONDS = 16, 0.02
#: Each publisher has a topic; there are enough topics to keep each server busy.
PUBLISHERS = 16
#: The connections of each server to HBase: one, so that two servers leave processor time for HBase and the publishers.
CONNECTIONS = 1
SECONDS, TURNS = size("TMS_BENCH_SLOT_SECONDS", 5), size("TMS_BENCH_TURNS", 5)
BATCH_MESSAGES = 20
#: The settings of the servers for the ratio, and the number of turns; the figure's details have them.
SETTINGS = {"connections": CONNECTIONS, "transactions": "none", "best_of": TURNS}
#: The messages and bytes of the model's batches.
BATCH, BYTES = 500, 1000
BATCHES = size("TMS_BENCH_SLOT_BATCHES", 60)
TX_CLIENTS = 32
NODES = (1, 10, 100)
PAGE = Path(__file__).parents[1] / "docs/explanation/scale.md"


class Rates(NamedTuple):
    """The measured rates of the model.

    Attributes:
        node_rate: events per second of a server's processor time.
        tx_rate: transactions per second.
    """

    node_rate: int
    tx_rate: int


def model(nodes: int, rates: Rates, batch: int = BATCH) -> int:
    """Return the events per second that a number of nodes produce and consume."""
    return min(nodes * rates.node_rate, rates.tx_rate * batch // 2)


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="p20-") as folder, hbase_server() as running, Tables(running) as tables:
        with run_slow_proxy(running.thrift) as slow_address:
            one, two = compare_servers(slow_address, tables, Path(folder))
        # All servers share the transaction service of this process, whose log is on this machine's disk.
        with Serve(configure(Path(folder))) as shared:
            service = shared.transactions
            rates = Rates(node_rate(running.thrift, tables.make(), Path(folder), service), tx_rate(service))
    details = {"one": round(one), "two": round(two), "delay_ms": DELAY_SECONDS * 1000, "slots": SLOTS, **SETTINGS}
    name = "messages per second published and read: two servers ÷ one, on one HBase"
    figures = [Figure("P20", name, round(two / one, 2), at_least=1.8, details=details)]
    bars = {10: 100_000}
    for nodes in NODES:
        name = f"events per second on {nodes} nodes, by the model"
        details = {"nodes": nodes, "batch": BATCH, **rates._asdict()}
        figures.append(Figure("P20", name, model(nodes, rates), at_least=bars.get(nodes), details=details))
    for figure in figures:
        report(figure)
    if "--page" in arguments:
        PAGE.write_text(render_page(PAGE.read_text(encoding="utf-8"), [figure.line() for figure in figures]), "utf-8")


# --- servers that wait for their store -------------------------------------------------------------------------------


@contextmanager
def run_slow_proxy(thrift: str) -> Iterator[str]:
    """Yield another address of HBase with delayed responses, served by a separate process."""
    spawn = multiprocessing.get_context("spawn")
    addresses: Queue[str] = spawn.Queue()
    process = spawn.Process(target=forward_slowly, args=(thrift, addresses))
    process.start()
    yield addresses.get(timeout=60)
    process.terminate()
    process.join()


def forward_slowly(thrift: str, addresses: Queue[str]) -> None:
    """Forward connections with a delay until the process is terminated."""
    with Proxy(thrift) as proxy:
        proxy.conduct = lambda _: Conduct(delay_seconds=DELAY_SECONDS)
        addresses.put(proxy.address)
        Event().wait()


def compare_servers(thrift: str, tables: Tables, folder: Path) -> list[float]:
    """Return the messages per second of one server and of two, each the best of some turns.

    The best turn counts, because other programs can only slow a turn down.
    """
    with ExitStack() as stack:
        variants = [stack.enter_context(start_servers(thrift, tables.make(), folder, servers)) for servers in (1, 2)]
        turn_rates = [[turn() for turn in variants] for _ in range(TURNS)]
    return [max(variant_rates) for variant_rates in zip(*turn_rates, strict=True)]


@contextmanager
def start_servers(thrift: str, namespace: str, folder: Path, servers: int) -> Iterator[Callable[[], float]]:
    """Start servers and publishers; yield a function that runs one turn and returns its rate."""
    hbase: dict[str, object] = {"thrift": [thrift], "namespace": namespace, "buckets": 4, "connections": CONNECTIONS}
    with ExitStack() as stack:
        running = [stack.enter_context(serve(folder, hbase, ordinal, servers)) for ordinal in range(servers)]
        wait_until(lambda: {slots_led(server) for server in running} == {SLOTS // servers})
        threads = stack.enter_context(ThreadPoolExecutor(PUBLISHERS))
        ports = [running[at % servers].port for at in range(PUBLISHERS)]
        publishers = list(threads.map(Publisher, ports, range(PUBLISHERS)))

        def turn() -> float:
            # Publishers finish their current round, so a turn lasts longer than SECONDS.
            started = time.monotonic()
            done = sum(threads.map(Publisher.work, publishers))
            return done / (time.monotonic() - started)

        yield turn


class Publisher:
    """A client that publishes messages to a separate topic and reads them back.

    Args:
        port: the port of its server.
        number: the number of its topic.
    """

    def __init__(self, port: int, number: int) -> None:
        self._port = port
        self._name = f"t{number}"
        self._start: dict[str, object] = {}
        with Client(port) as client:
            topic = TopicClient(client, self._name)
            # The server may not know the leader of the topic yet.
            wait_until(lambda: client.ask("PUT", topic.path, b"{}").status == 200)
            self._publish(topic)

    def work(self) -> int:
        """Publish and read back for a turn, and return the number of messages."""
        done, deadline = 0, time.monotonic() + SECONDS
        with Client(self._port) as client:
            topic = TopicClient(client, self._name)
            while time.monotonic() < deadline:
                done += self._publish(topic)
        return done

    def _publish(self, topic: TopicClient) -> int:
        topic.publish(*["x" * 100] * BATCH_MESSAGES)
        messages = topic.post("poll", self._start).json
        if len(messages) != BATCH_MESSAGES:
            raise RuntimeError(f"read {len(messages)} of {BATCH_MESSAGES} messages")
        self._start = {"startFrom": {"id": messages[-1]["id"]}, "inclusive": False}
        return BATCH_MESSAGES


@contextmanager
def serve(
    folder: Path, hbase: dict[str, object], ordinal: int, servers: int, transactions: str = ""
) -> Iterator[Serve]:
    """Run one of several servers on one HBase."""
    source = {"source": "thrift", "thrift": transactions} if transactions else {"source": SETTINGS["transactions"]}
    path = folder / f"{hbase['namespace']}-{ordinal}.yaml"
    leader = {"advertise": "http://127.0.0.1:0", "slots": SLOTS, "servers": servers, "ordinal": ordinal}
    path.write_text(
        yaml.safe_dump(
            {
                "storage": {"kind": "hbase", "hbase": hbase},
                "transactions": source,
                "server": {"port": 0, "leader": leader},
            }
        )
    )
    with Serve(path) as server:
        yield server
        server.end()


def slots_led(server: Serve) -> int:
    with Client(server.port) as client:
        lines = client.ask("GET", "/metrics").text.splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith("tms_server_slots "))


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Return when the condition holds.

    Raises:
        RuntimeError: the condition does not hold in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the servers do not lead all slots after {seconds:g} s")
        time.sleep(0.1)


# --- rates of the model ----------------------------------------------------------------------------------------------


def node_rate(thrift: str, namespace: str, folder: Path, transactions: str) -> int:
    """Return the events per second of the server's processor time, produced and consumed in transactions."""
    with serve(folder, {"thrift": [thrift], "namespace": namespace, "buckets": 4}, 0, 1, transactions) as server:
        wait_until(lambda: slots_led(server) == SLOTS)
        with open_client((server.url, transactions)) as client:
            client.create_topic("default:events")
            before = processor_seconds(server.process.pid)
            for _ in range(BATCHES):
                with client.transaction() as tx:
                    tx.publish("default:events", [b"x" * BYTES] * BATCH)
            work, done = client.work("default:events", "workers", batch=BATCH), 0
            for _, batch in work:
                done += len(batch)
                if done == BATCHES * BATCH:
                    work.stop()
            return round(done / (processor_seconds(server.process.pid) - before))


def tx_rate(address: str) -> int:
    """Return the transactions started and committed per second, the best of some turns."""

    def run_transactions(client: TransactionClient) -> int:
        done, deadline = 0, time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            tx = client.start_short(30)
            client.can_commit(tx.transaction_id, [])
            client.commit(tx.transaction_id)
            done += 1
        return done

    with ThreadPoolExecutor(TX_CLIENTS) as threads, TransactionClient(address) as client:
        return round(max(sum(threads.map(run_transactions, [client] * TX_CLIENTS)) for _ in range(TURNS)) / SECONDS)


# --- the page --------------------------------------------------------------------------------------------------------

_BEGIN, _END = "<!-- figures -->\n", "<!-- /figures -->\n"


def render_page(page: str, lines: list[str]) -> str:
    """Return the page with new figures and their arithmetic."""
    head, rest = page.split(_BEGIN)
    tail = rest.split(_END)[1]
    ratio, *modelled = [json.loads(line) for line in lines]
    rows = ["| nodes | nodes × node rate | tx/s × batch ÷ 2 | events/s |", "|---|---|---|---|"]
    for one in modelled:
        nodes, node, tx, batch = (one[name] for name in ("nodes", "node_rate", "tx_rate", "batch"))
        rows.append(
            f"| {nodes} | {nodes} × {node:,} = {nodes * node:,} | {tx:,} × {batch} ÷ 2 = {tx * batch // 2:,} "
            f"| {model(nodes, Rates(node, tx), batch):,} |"
        )
    block = "\n".join(
        [
            "```",
            *lines,
            "```",
            "",
            f"Two servers ÷ one: {ratio['two']:,} ÷ {ratio['one']:,} = {ratio['value']:.2f}",
            "",
            *rows,
            "",
        ]
    )
    return head + _BEGIN + block + _END + tail


if __name__ == "__main__":
    main(sys.argv[1:])
