"""P20: what a second server adds on one HBase, and what that comes to on 10 and on 100 nodes.

One server of 16 slots, then two that share them, on one HBase behind a line on which each answer takes 20 ms: so what a
server waits for is the limit, and not this machine's processors, which all processes share. Publishers each have a
topic, publish some messages and read them back. Each server has one connection to HBase (the default is 4), there are
no transactions, and each rate is the best of some turns.

The model beside it needs two rates, measured without that line:

* **node rate**: events produced *and* consumed in transactions through one server on HBase, as a group, in batches of
  500 × 1 KB, divided by the seconds of processor time that the server's process took for them. So a node is a machine
  that has a processor for ``tms serve``; HBase, producers and consumers, which share this machine's processors here,
  have their own.
* **tx/s**: transactions begun and committed per second, by the clock, through one transaction service whose log is
  synced to disk, by as many clients at once.

An event takes a share of two transactions, the one that produces its batch and the one that consumes it. So *n* nodes
do min(n × node rate, tx/s × batch ÷ 2) events per second. ``python -m benchmarks.p20_slots --page`` writes the figures
and the arithmetic into ``docs/explanation/scale.md``.
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
from benchmarks.p14_groups import opened
from benchmarks.p23_idle import processor_seconds
from tests.hbase.tables import Tables
from tests.kit.proxy import Conduct, Proxy
from tests.server.client import Client, TopicClient
from tests.server.process import Serve, configure
from tests.support import size
from tms_core.transaction.rpc.client import TransactionClient

SLOTS, DELAY_SECONDS = 16, 0.02
#: Each has a topic, so each slot has some, and each server has more to do than it does at once.
PUBLISHERS = 16
#: Of each server to HBase: one, so that two servers that wait leave processors for HBase and all others here.
CONNECTIONS = 1
SECONDS, TURNS = size("TMS_BENCH_SLOT_SECONDS", 5), size("TMS_BENCH_TURNS", 5)
FEW = 20
#: How servers are set while the ratio is measured, and of how many turns each rate is the best; said beside it.
SET = {"connections": CONNECTIONS, "transactions": "none", "best_of": TURNS}
#: Of the model.
BATCH, BYTES = 500, 1000
BATCHES = size("TMS_BENCH_SLOT_BATCHES", 60)
TX_CLIENTS = 32
NODES = (1, 10, 100)
PAGE = Path(__file__).parents[1] / "docs/explanation/scale.md"


class Measured(NamedTuple):
    """What the model stands on.

    Attributes:
        node_rate: events per second of a server's processor time.
        tx_rate: transactions per second.
    """

    node_rate: int
    tx_rate: int


def model(nodes: int, measured: Measured, batch: int = BATCH) -> int:
    """Return the events per second, produced and consumed, of so many nodes."""
    return min(nodes * measured.node_rate, measured.tx_rate * batch // 2)


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="p20-") as folder, hbase_server() as running, Tables(running) as tables:
        with delayed(running.thrift) as slow:
            one, two = rates(slow, tables, Path(folder))
        # Its transaction service, with a log on this machine's disk, is what all servers share.
        with Serve(configure(Path(folder))) as shared:
            service = shared.transactions
            measured = Measured(node_rate(running.thrift, tables.make(), Path(folder), service), tx_rate(service))
    details = {"one": round(one), "two": round(two), "delay_ms": DELAY_SECONDS * 1000, "slots": SLOTS, **SET}
    name = "messages per second published and read: two servers ÷ one, on one HBase"
    figures = [Figure("P20", name, round(two / one, 2), at_least=1.8, details=details)]
    bars = {10: 100_000}
    for nodes in NODES:
        name = f"events per second on {nodes} nodes, by the model"
        given = {"nodes": nodes, "batch": BATCH, **measured._asdict()}
        figures.append(Figure("P20", name, model(nodes, measured), at_least=bars.get(nodes), details=given))
    for figure in figures:
        report(figure)
    if "--page" in arguments:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), [figure.line() for figure in figures]), "utf-8")


# --- servers that wait for their store -------------------------------------------------------------------------------


@contextmanager
def delayed(thrift: str) -> Iterator[str]:
    """Yield another address of HBase with delayed responses, served by a separate process."""
    spawn = multiprocessing.get_context("spawn")
    addresses: Queue[str] = spawn.Queue()
    process = spawn.Process(target=pass_on, args=(thrift, addresses))
    process.start()
    yield addresses.get(timeout=60)
    process.terminate()
    process.join()


def pass_on(thrift: str, addresses: Queue[str]) -> None:
    """Pass on what comes until the process is ended."""
    with Proxy(thrift) as slow:
        slow.conduct = lambda _: Conduct(delay_seconds=DELAY_SECONDS)
        addresses.put(slow.address)
        Event().wait()


def rates(thrift: str, tables: Tables, folder: Path) -> list[float]:
    """Return the messages per second of one server and of two, each the best of some turns.

    The two sites take turns, and the best turn of each counts, because other programs can only slow a turn down.
    """
    with ExitStack() as stack:
        sites = [stack.enter_context(site(thrift, tables.make(), folder, servers)) for servers in (1, 2)]
        found = [[turn() for turn in sites] for _ in range(TURNS)]
    return [max(each) for each in zip(*found, strict=True)]


@contextmanager
def site(thrift: str, namespace: str, folder: Path, servers: int) -> Iterator[Callable[[], float]]:
    """Run so many servers and publishers; yield a function that runs one turn."""
    hbase: dict[str, object] = {"thrift": [thrift], "namespace": namespace, "buckets": 4, "connections": CONNECTIONS}
    with ExitStack() as stack:
        running = [stack.enter_context(serve(folder, hbase, ordinal, servers)) for ordinal in range(servers)]
        until(lambda: {slots_led(server) for server in running} == {SLOTS // servers})
        threads = stack.enter_context(ThreadPoolExecutor(PUBLISHERS))
        ports = [running[at % servers].port for at in range(PUBLISHERS)]
        publishers = list(threads.map(Publisher, ports, range(PUBLISHERS)))

        def turn() -> float:
            # Rounds that have begun are ended, so a turn lasts as long as the last of them, not as long as it should.
            begun = time.monotonic()
            done = sum(threads.map(Publisher.work, publishers))
            return done / (time.monotonic() - begun)

        yield turn


class Publisher:
    """Publishes messages to a topic of its own and reads them back.

    Args:
        port: the server's that it asks.
        number: its topic's.
    """

    def __init__(self, port: int, number: int) -> None:
        self._port = port
        self._name = f"t{number}"
        self._start: dict[str, object] = {}
        with Client(port) as client:
            topic = TopicClient(client, self._name)
            # A server may not know yet who leads the topic.
            until(lambda: client.ask("PUT", topic.path, b"{}").status == 200)
            self._publish(topic)

    def work(self) -> int:
        """Publish and read back for a turn, and return the number of messages."""
        done, ends = 0, time.monotonic() + SECONDS
        with Client(self._port) as client:
            topic = TopicClient(client, self._name)
            while time.monotonic() < ends:
                done += self._publish(topic)
        return done

    def _publish(self, topic: TopicClient) -> int:
        topic.publish(*["x" * 100] * FEW)
        found = topic.post("poll", self._start).json
        if len(found) != FEW:
            raise RuntimeError(f"{len(found)} messages were read, of {FEW}")
        self._start = {"startFrom": {"id": found[-1]["id"]}, "inclusive": False}
        return FEW


@contextmanager
def serve(
    folder: Path, hbase: dict[str, object], ordinal: int, servers: int, transactions: str = ""
) -> Iterator[Serve]:
    """Run one of so many servers on one HBase."""
    source = {"source": "thrift", "thrift": transactions} if transactions else {"source": SET["transactions"]}
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


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Return when the condition holds.

    Raises:
        RuntimeError: it does not.
    """
    ends = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends:
            raise RuntimeError("the servers do not come to lead")
        time.sleep(0.1)


# --- what the model stands on ----------------------------------------------------------------------------------------


def node_rate(thrift: str, namespace: str, folder: Path, transactions: str) -> int:
    """Return the events per second of the server's processor time, produced and consumed in transactions."""
    with serve(folder, {"thrift": [thrift], "namespace": namespace, "buckets": 4}, 0, 1, transactions) as server:
        until(lambda: slots_led(server) == SLOTS)
        with opened((server.url, transactions)) as client:
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

    def transact(client: TransactionClient) -> int:
        done, ends = 0, time.monotonic() + SECONDS
        while time.monotonic() < ends:
            tx = client.start_short(30)
            client.can_commit(tx.transaction_id, [])
            client.commit(tx.transaction_id)
            done += 1
        return done

    with ThreadPoolExecutor(TX_CLIENTS) as threads, TransactionClient(address) as client:
        return round(max(sum(threads.map(transact, [client] * TX_CLIENTS)) for _ in range(TURNS)) / SECONDS)


# --- the page --------------------------------------------------------------------------------------------------------

_BEGIN, _END = "<!-- figures -->\n", "<!-- /figures -->\n"


def written(page: str, lines: list[str]) -> str:
    """Return the page with these figures and the resulting arithmetic."""
    head, rest = page.split(_BEGIN)
    tail = rest.split(_END)[1]
    ratio, *modelled = [json.loads(line) for line in lines]
    rows = ["| nodes | nodes × node rate | tx/s × batch ÷ 2 | events/s |", "|---|---|---|---|"]
    for one in modelled:
        nodes, node, tx, batch = (one[name] for name in ("nodes", "node_rate", "tx_rate", "batch"))
        rows.append(
            f"| {nodes} | {nodes} × {node:,} = {nodes * node:,} | {tx:,} × {batch} ÷ 2 = {tx * batch // 2:,} "
            f"| {model(nodes, Measured(node, tx), batch):,} |"
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
