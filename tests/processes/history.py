"""Groups and producers on a server under random faults: real processes and a faulty network.

Producers publish orders to a topic whose number of partitions changes; the workers of two groups bill them. A seed
draws the faults and their times. At the end the test repairs the network, the disk and the clock, and all programs must
finish without help. These invariants hold in every history, and a failed check names its invariant:

* **R1** each order is in exactly one committed bill of each group, or in a dead letter instead
* **R2** every acknowledged order is billed, and every order that the server reports as published to its producer
* **R3** the orders of a producer are billed in their order by a group that keeps it
* **R4** no order of a fenced instance comes after the first order of a newer instance
* **R5** a reader that follows the bills sees the same bills in the same order as a reader at the end
* **R6** orders are deleted once both groups have processed them, and bills, which have no group, are not
* **R7** a program exits only if it was killed or fenced, and all orders are billed in the end
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from random import Random

import yaml

from tests.kit.proxy import HONEST, Conduct, Fault, Kind, Proxy
from tests.processes.machine import Machine
from tests.processes.programs import DEAD, FENCED, OPTIONS, ORDERS, Order, bills_of, published_by
from tests.server.process import Serve, configure
from tms_core.client import Client, MessageId, TmsError, TopicId

PRODUCERS = ("ann", "ben")
#: The number of workers of each group.
GROUPS = {"strict": 2, "sharing": 2}
#: The time limit for the programs to finish after the repair, in seconds.
PATIENCE_SECONDS = 180
#: The maximum wait for a billed order between two events, in seconds.
_PROGRESS_SECONDS = 3
_POLL_SECONDS = 0.2


class Violation(AssertionError):
    """An invariant does not hold."""


#: The relative frequency of each event.
WEIGHTS: dict[str, float] = {
    "kill_server": 2,
    "kill_worker": 4,
    "kill_producer": 3,
    "pause_server": 2,
    "pause_worker": 3,
    "replace_producer": 2,
    "cut": 3,
    "lose_answers": 3,
    "delay_answers": 2,
    "fill_disk": 2,
    "step_clock": 2,
    "change_partitions": 2,
}


class Follower(threading.Thread):
    """A reader that follows the bills of a group from the first bill."""

    def __init__(self, client: Client, topic: str) -> None:
        super().__init__(name=f"follower of {topic}")
        self.seen: list[tuple[str, bytes]] = []
        self.violation = b""
        self._payloads = set[bytes]()
        self._messages = client.consume(topic, read="committed", wait_seconds=1)

    def run(self) -> None:
        with self._messages as messages:
            for message in messages:
                self.seen.append((str(message.id), message.payload))
                if message.payload in self._payloads:
                    self.violation = self.violation or message.payload
                self._payloads.add(message.payload)

    def has_seen(self, number: int) -> bool:
        return len(self.seen) >= number

    def stop(self) -> None:
        self._messages.stop()
        self.join(PATIENCE_SECONDS)


@dataclass
class Program:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def errors(self) -> str:
        return self.log.read_text()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class History:
    """A server on a simulated machine, the programs that use it, and their events.

    Args:
        folder: the folder of the store, and of the logs and output of the programs.
        seed: the seed of the random events.
        outside: a deliberate bug: workers publish bills outside the transaction.

    Attributes:
        events: the count of each event.
    """

    folder: Path
    seed: int
    outside: bool = False
    events: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._stack = ExitStack()
        self._machine = Machine(self.folder)
        self._config = self._configure()
        self._server = self._serve()
        self._rest = self._stack.enter_context(Proxy(f"127.0.0.1:{self._server.port}"))
        self._transactions = self._stack.enter_context(Proxy(f"127.0.0.1:{self._server.transactions_port}"))
        self._threads = self._stack.enter_context(ThreadPoolExecutor(1))
        #: The pending start of a server; None: no start is pending.
        self._starting: list[Future[Serve]] = []
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._started = 0
        self._client = self._stack.enter_context(self._connect())
        self._client.create_topic(ORDERS, properties={"partitions": "2", "retention": "consumed"})
        for group in GROUPS:
            self._client.create_topic(bills_of(group), properties={"retention": "consumed"})
            # Before the first order, because the janitor deletes orders that all known groups have processed.
            for partition in range(2):
                self._client.set_position(f"{ORDERS}-{partition}", group, MessageId(0, 0))
        self._workers = [self._worker(group) for group, number in GROUPS.items() for _ in range(number)]
        self._producers = [self._producer(name) for name in PRODUCERS]
        #: The instances that a newer instance has replaced while they were paused.
        self._replaced: list[Program] = []
        self._followers = [Follower(self._client, bills_of(group)) for group in GROUPS]
        for follower in self._followers:
            follower.start()
        self._wait_until(lambda: all(follower.seen for follower in self._followers), "R7: nothing is billed")

    def close(self) -> None:
        """Stop every process."""
        for program in [*self._workers, *self._producers, *self._replaced]:
            program.kill()
        self._repair_network()
        for follower in self._followers:
            follower.stop()
        self._machine.limit_disk(None)
        for starting in self._starting:
            self._server = starting.result()
        self._server.__exit__()
        self._stack.close()

    # -- events -------------------------------------------------------------------------------------------------------

    def disturb(self, seconds: float) -> None:
        """Cause random events for a duration, or until a follower has seen a violation."""
        ends = time.monotonic() + seconds
        names, weights = tuple(WEIGHTS), tuple(WEIGHTS.values())
        while time.monotonic() < ends:
            name = self._random.choices(names, weights)[0]
            getattr(self, f"_{name}")()
            self.events[name] += 1
            self._wait(self._random.uniform(0.05, 0.4))

    def _wait(self, seconds: float) -> None:
        """Wait for a duration, and then for another billed order: on a busy machine, programs start slowly."""
        before, started = self._seen(), time.monotonic()
        while True:
            time.sleep(seconds / 5)
            self._undo_due()
            self._await_server()
            self._restart_fenced()
            self._check_followers()
            waited = time.monotonic() - started
            if waited > seconds and (self._seen() > before or waited > _PROGRESS_SECONDS):
                return

    def _seen(self) -> int:
        return sum(len(follower.seen) for follower in self._followers)

    def _kill_server(self) -> None:
        if not self._starting:
            self._server.kill()
            self._server.__exit__()
            self._starting.append(self._threads.submit(self._serve))

    def _await_server(self, seconds: float = 0) -> None:
        """Send requests to the server once it has started; start it again as long as the disk is full."""
        if not self._starting or not wait(self._starting, seconds).done:
            return
        try:
            self._server = self._starting.pop().result()
        except AssertionError as error:
            # Like a supervisor, start the server repeatedly until the disk has space.
            if not re.search("No space left|disk is full", str(error)):
                raise
            self.events["start on a full disk"] += 1
            self._starting.append(self._threads.submit(self._serve))
            return
        self._rest.target = f"127.0.0.1:{self._server.port}"
        self._transactions.target = f"127.0.0.1:{self._server.transactions_port}"

    def _kill_worker(self) -> None:
        index = self._random.randrange(len(self._workers))
        killed = self._workers[index]
        killed.kill()
        self._workers[index] = self._worker(killed.name)

    def _kill_producer(self) -> None:
        index = self._random.randrange(len(self._producers))
        killed = self._producers[index]
        killed.kill()
        self._producers[index] = self._producer(killed.name)

    def _pause_server(self) -> None:
        if self._starting:
            return
        server = self._server
        server.pause()
        self._run_later(self._random.uniform(0.1, 3), server.resume)

    def _pause_worker(self) -> None:
        worker = self._random.choice(self._workers)
        worker.pause()
        # Mostly longer than a transaction's timeout, so that the worker resumes too late.
        self._run_later(self._random.uniform(0.5, 5), worker.resume)

    def _replace_producer(self) -> None:
        """Pause a producer, start its successor, and resume the paused producer."""
        index = self._random.randrange(len(self._producers))
        paused = self._producers[index]
        paused.pause()
        self._replaced.append(paused)
        self._producers[index] = self._producer(paused.name)
        self._run_later(self._random.uniform(0.5, 3), paused.resume)

    def _cut(self) -> None:
        self._treat(lambda _: HONEST)

    def _lose_answers(self) -> None:
        """Drop responses, but not requests; sometimes the connection stays open for a while."""
        kinds: list[Kind] = ["cut", "half-open", "blackhole"]
        kind = self._random.choice(kinds)
        bytes_ = [self._random.choice((0, 100, 1000)) for _ in range(5)]
        self._treat(lambda number: Conduct(down=Fault(kind, bytes_[number % len(bytes_)])))
        self._run_later(self._random.uniform(0.1, 1.5), self._repair_network)

    def _delay_answers(self) -> None:
        seconds = self._random.uniform(0.01, 0.3)
        self._treat(lambda _: Conduct(delay_seconds=seconds))
        self._run_later(self._random.uniform(0.1, 1.5), self._repair_network)

    def _fill_disk(self) -> None:
        self._machine.limit_disk(self._random.choice((0, 10, 1000, 20_000)))
        self._run_later(self._random.uniform(0.2, 3), lambda: self._machine.limit_disk(None))

    def _step_clock(self) -> None:
        """Step the clock far back, or a little ahead: messages with future times are deleted only after these times."""
        self._machine.set_clock(self._random.choice((-3600, -100, -10, -2, 0, 2, 10)) * 1000)

    def _change_partitions(self) -> None:
        with suppress(TmsError):
            # The request replaces all properties.
            number = str(self._random.randint(1, 4))
            self._client.update_topic(ORDERS, properties={"partitions": number, "retention": "consumed"})
            self.events["partitions changed"] += 1

    def _treat(self, conduct: Callable[[int], Conduct]) -> None:
        for proxy in (self._rest, self._transactions):
            proxy.treat(conduct)

    def _repair_network(self) -> None:
        self._treat(lambda _: HONEST)

    def _run_later(self, seconds: float, action: Callable[[], None]) -> None:
        self._undo.append((time.monotonic() + seconds, action))

    def _undo_due(self) -> None:
        now = time.monotonic()
        due = [action for at, action in self._undo if at <= now]
        self._undo = [(at, action) for at, action in self._undo if at > now]
        for action in due:
            action()

    def _restart_fenced(self) -> None:
        """Restart a producer whose newest instance an older instance has fenced by resuming and registering again."""
        for index, program in enumerate(self._producers):
            if program.process.poll() is not None:
                self._check_end(program)
                self._replaced.append(program)
                self._producers[index] = self._producer(program.name)
                self.events["fenced"] += 1

    # -- end ----------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Repair all faults, stop the producers, and check the invariants."""
        self._machine.limit_disk(None)
        self._machine.set_clock(0)
        while self._undo:
            time.sleep(_POLL_SECONDS)
            self._undo_due()
        self._repair_network()
        while self._starting:
            self._await_server(_POLL_SECONDS)
        self._stop_producers()
        labeled = {name: self._labeled_of(name) for name in PRODUCERS}
        self._wait_until(lambda: not self._remaining(), "R6, R7: orders are not billed, or are billed and not deleted")
        strict, sharing = ([Order.of(bill) for _, bill in self._committed(bills_of(group))] for group in GROUPS)
        dead = [Order.of(bill) for _, bill in self._committed(DEAD)] if self._has_dead() else []
        self.events.update({"orders": len(strict), "dead letters": len(dead)})
        check_order(strict, labeled)
        check_sharing(strict, sharing, dead)
        if missing := self._acknowledged() - set(strict):
            raise Violation(f"R2: {sorted(missing)} are acknowledged and not billed")
        self._check_readers()
        for worker in self._workers:
            if worker.process.poll() is not None:
                raise Violation(f"R7: a worker of {worker.name} has ended: {worker.errors}")

    def _stop_producers(self) -> None:
        for program in [*self._producers, *self._replaced]:
            with suppress(ProcessLookupError):
                program.process.send_signal(signal.SIGTERM)
        for program in [*self._producers, *self._replaced]:
            try:
                program.process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                raise Violation(f"R7: producer {program.name} does not end") from None
            self._check_end(program)

    def _check_end(self, program: Program) -> None:
        # A producer that receives SIGTERM before it has a handler dies of the signal; it has not published yet.
        if program.process.returncode not in (0, FENCED, -signal.SIGTERM):
            code = program.process.returncode
            raise Violation(f"R7: producer {program.name} ended with {code}: {program.errors}")
        self.events["was fenced"] += program.process.returncode == FENCED

    def _labeled_of(self, name: str) -> int:
        """Return the number of published labeled orders of a producer, as reported to its next instance."""
        with self._client.producer(ORDERS, name) as producer:
            return published_by(producer)

    def _acknowledged(self) -> set[Order]:
        """Return the acknowledged orders; the last line of a killed producer may be incomplete, and is skipped."""
        lines = [line for path in self.folder.glob("producer-*.out") for line in path.read_bytes().splitlines(True)]
        return {Order.of(line) for line in lines if line.endswith(b"\n")}

    def _has_dead(self) -> bool:
        return TopicId.parse(DEAD) in self._client.topics("default")

    def _remaining(self) -> list[TopicId]:
        """Return the topics of orders that still have rows."""
        partitions = [topic for topic in self._client.topics("default") if re.match(r"orders-[\df]", topic.topic)]
        return [topic for topic in partitions if list(self._client.poll(topic, limit=1))]

    def _check_readers(self) -> None:
        for group, follower in zip(GROUPS, self._followers, strict=True):
            bills = self._committed(bills_of(group))
            self._wait_until(partial(follower.has_seen, len(bills)), f"R5: a follower of {group} makes no progress")
            if follower.seen != bills:
                raise Violation(f"R5: a follower of {group} has seen other bills than a reader at the end")
        self._check_followers()

    def _check_followers(self) -> None:
        for group, follower in zip(GROUPS, self._followers, strict=True):
            if follower.violation:
                raise Violation(f"R1: {group} has billed {follower.violation!r} twice")
            if not follower.is_alive():
                raise Violation(f"R7: the follower of {group} has ended")

    def _committed(self, topic: str) -> list[tuple[str, bytes]]:
        with self._client.transaction() as tx:
            return [(str(message.id), message.payload) for message in tx.poll(topic)]

    @staticmethod
    def _wait_until(condition: Callable[[], bool], message: str) -> None:
        ends = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > ends:
                raise Violation(message)
            time.sleep(_POLL_SECONDS)

    # -- processes ----------------------------------------------------------------------------------------------------

    def _configure(self) -> Path:
        path = configure(self.folder)
        settings = yaml.safe_load(path.read_text())
        settings["server"]["consumers"] = {"retry_seconds": self._random.choice((0, 1)), "longest_retry_seconds": 2}
        # The janitor deletes processed orders only up to the last snapshot.
        settings["transactions"]["snapshot_interval_seconds"] = 1
        path.write_text(yaml.safe_dump(settings))
        return path

    def _serve(self) -> Serve:
        return Serve(self._config, janitor=True, environment=self._machine.environment)

    def _connect(self) -> Client:
        return Client(f"http://{self._rest.address}", transactions=self._transactions.address, options=OPTIONS)

    def _worker(self, group: str) -> Program:
        return self._program("worker", group, *(["outside"] if self.outside else []))

    def _producer(self, name: str) -> Program:
        return self._program("producer", name)

    def _program(self, kind: str, name: str, *options: str) -> Program:
        self._started += 1
        stem = self.folder / f"{kind}-{name}-{self._started}"
        words = [sys.executable, "-m", "tests.processes.programs", kind, f"http://{self._rest.address}"]
        words += [self._transactions.address, name, *options]
        with stem.with_suffix(".out").open("wb") as output, stem.with_suffix(".err").open("wb") as errors:
            process = subprocess.Popen(words, stdout=output, stderr=errors, env=self._machine.environment)
        return Program(name, process, stem.with_suffix(".err"))


def check_order(bills: list[Order], labeled: dict[str, int]) -> None:
    """Check the bills of a group that keeps the order of each producer."""
    for name, number in labeled.items():
        found = [order for order in bills if order.name == name]
        generations = [order.generation for order in found]
        if generations != sorted(generations):
            raise Violation(f"R4: orders of {name} come from a fenced instance: {generations}")
        if (numbers := [order.number for order in found if order.series == "labeled"]) != list(range(number)):
            raise Violation(f"R1, R2, R3: {name} published {number} labeled orders, and billed are {numbers}")
        for generation, orders in groupby(found, lambda order: order.generation):
            singles = [order.number for order in orders if order.series == "single"]
            if singles != list(range(len(singles))):
                raise Violation(f"R1, R3: single orders of {name} {generation} are billed as {singles}")


def check_sharing(strict: list[Order], sharing: list[Order], dead: list[Order]) -> None:
    """Check the bills and the dead letters of a group whose workers share the orders in any order."""
    if poisonous := [order for order in sharing if order.is_poisonous]:
        raise Violation(f"R1: {poisonous} are billed, and the program fails with them")
    found = Counter(sharing) + Counter(dead)
    if twice := [order for order, times in found.items() if times > 1]:
        raise Violation(f"R1: sharing has processed {twice} twice")
    if other := found.keys() ^ set(strict):
        raise Violation(f"R1: only one group has processed {sorted(other)}")
