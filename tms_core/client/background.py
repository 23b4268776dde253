"""Messages that are published some time: a bounded buffer, and somebody who empties it.

A program that must not wait for the disk of another machine hands its messages over and goes on. What is bounded is
how many wait; what happens to the next one then is the program's choice, and whatever is not published is counted, and
told by ``flush`` and ``close``. A batch that was not answered is sent again, so a message may be there twice.

The thread (or task) that publishes lives as long as there is something to publish, so an idle client has none. A
program that ends without closing its client ends when all of it is published, or ``close_seconds`` later: the thread is
a daemon, since one that waits for a server that hangs would keep the program for as long as that does.

A process that was forked has the parent's memory, but not its threads: there the buffer is empty, since what waits is
published by the parent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Sequence

from tms_core.client import calls
from tms_core.client.calls import Topic, topic_id
from tms_core.client.core import NOT_DONE, UNKNOWN, Core
from tms_core.client.messages import payloads_of
from tms_core.client.values import Buffer, Limits
from tms_core.client.waiting import Batch, PublishFigures, Waiting
from tms_core.client.wire import run
from tms_core.errors import NotPublished, TmsError

logger = logging.getLogger(__name__)


class _Background:
    """What both publishers do: one batch after the other."""

    def __init__(self, core: Core, buffer: Buffer, limits: Limits, close_seconds: float) -> None:
        self._core = core
        self._buffer = buffer
        self._request_bytes = limits.request_bytes
        self._close_seconds = close_seconds
        self._begin()

    def _begin(self) -> None:
        self._waiting = Waiting(self._buffer, self._request_bytes)
        self._stop = self._core.wire.stop()
        # Nobody waits for company any more.
        self._hurry = self._core.wire.stop()

    async def _send(self, batch: Batch) -> TmsError | None:
        """Publish a batch; what it failed of, whatever that is, since other batches have nothing to do with it."""
        try:
            await self._repeat(batch)
        except TmsError as error:
            return error
        except Exception as error:
            logger.exception("publishing failed")
            return NotPublished(f"{type(error).__name__}: {error}")
        return None

    async def _repeat(self, batch: Batch) -> None:
        call = calls.publish(batch.topic, batch.payloads, None)
        retry = self._buffer.retry
        for failures in range(1, retry.attempts):
            try:
                return await self._core.wire.ask(call)
            except (*NOT_DONE, *UNKNOWN):
                self._waiting.retries += 1
                await self._stop.wait(retry.pause_seconds(failures, self._core.random))
        return await self._core.wire.ask(call)

    def _give_up(self) -> None:
        """The time to close is over."""
        reason = f"there was no answer within {self._close_seconds:g} s of closing (Timeouts.close_seconds)."
        self._waiting.abandon(NotPublished(reason))


class BackgroundThread(_Background):
    """Publishes from a thread; any number of threads may hand over.

    Args:
        core: who publishes.
        buffer: how much may wait.
        limits: how much is sent at once.
        close_seconds: how long closing waits for what is not published yet.
    """

    def __init__(self, core: Core, buffer: Buffer, limits: Limits, close_seconds: float) -> None:
        super().__init__(core, buffer, limits, close_seconds)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._forked = threading.Lock()
        self._at_exit = weakref.finalize(self, _flush_at_exit, weakref.ref(self))

    @property
    def figures(self) -> PublishFigures:
        """What became of what it was given."""
        with self._here():
            return self._waiting.figures

    def publish(self, topic: Topic, messages: Sequence[bytes]) -> None:
        """Hand messages over."""
        name, payloads = topic_id(topic), payloads_of(messages)
        with self._here():
            for payload in payloads:
                while not self._waiting.offer(name, payload):
                    self._changed.wait()
                if self._thread is None:
                    thread = threading.Thread(target=self._work, name="tms-publish", daemon=True)
                    thread.start()
                    self._thread = thread

    def flush(self, timeout_seconds: float | None) -> None:
        """Return when all that was handed over until now is published."""
        with self._here():
            mark = self._waiting.mark()
            if not self._changed.wait_for(lambda: self._waiting.settled(mark), timeout_seconds):
                raise _still(self._waiting.figures)
            self._waiting.tell()

    def close(self) -> None:
        """Take no more, and return when all is published, or the time to close is over."""
        self._at_exit.detach()
        with self._here():
            self._waiting.closed = True
            self._hurry.set()
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._waiting.figures.waiting, self._close_seconds):
                self._give_up()
                self._changed.notify_all()
            self._waiting.tell()

    def flush_at_exit(self) -> None:
        """The program ends without having closed its client."""
        with self._here():
            self._hurry.set()
        try:
            self.flush(self._close_seconds)
        except NotPublished as error:
            logger.error("the program ends before all is published: %s", error)

    def _here(self) -> threading.Condition:
        """What guards the buffer. Somebody may have held the parent's when this process was forked from it."""
        if self._process != os.getpid():
            with self._forked:
                if self._process != os.getpid():
                    closed = self._waiting.closed
                    self._begin()
                    self._waiting.closed = closed
                    self._thread = None
                    self._changed = threading.Condition()
                    self._process = os.getpid()
        return self._changed

    def _work(self) -> None:
        try:
            while (batch := self._next()) is not None:
                error = run(self._send(batch))
                with self._changed:
                    self._waiting.settle(error)
                    self._changed.notify_all()
        except BaseException:
            with self._changed:
                self._thread = None
                self._waiting.abandon(NotPublished("The thread that publishes has failed."))
                self._changed.notify_all()
            raise

    def _next(self) -> Batch | None:
        if not self._waiting.full_batch:
            run(self._hurry.wait(self._buffer.linger_seconds))
        with self._changed:
            batch = self._waiting.take()
            if batch is None:
                self._thread = None
            self._changed.notify_all()
            return batch


class BackgroundTask(_Background):
    """Publishes from a task of the loop; takes what :class:`BackgroundThread` takes."""

    def __init__(self, core: Core, buffer: Buffer, limits: Limits, close_seconds: float) -> None:
        super().__init__(core, buffer, limits, close_seconds)
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    @property
    def figures(self) -> PublishFigures:
        """What became of what it was given."""
        return self._waiting.figures

    async def publish(self, topic: Topic, messages: Sequence[bytes]) -> None:
        """Hand messages over."""
        name, payloads = topic_id(topic), payloads_of(messages)
        async with self._changed:
            for payload in payloads:
                while not self._waiting.offer(name, payload):
                    await self._changed.wait()
                if self._task is None:
                    self._task = asyncio.create_task(self._work(), name="tms-publish")

    async def flush(self, timeout_seconds: float | None) -> None:
        """Return when all that was handed over until now is published."""
        async with self._changed:
            mark = self._waiting.mark()
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self._changed.wait_for(lambda: self._waiting.settled(mark))
            except TimeoutError as error:
                raise _still(self._waiting.figures) from error
            self._waiting.tell()

    async def close(self) -> None:
        """Take no more, and return when all is published, or the time to close is over."""
        async with self._changed:
            self._waiting.closed = True
            self._hurry.set()
            self._changed.notify_all()
        if self._task is not None:
            _, late = await asyncio.wait([self._task], timeout=self._close_seconds)
            if late:
                self._give_up()
            for task in late:
                task.cancel()
                await asyncio.wait(late)
        self._waiting.tell()

    async def _work(self) -> None:
        try:
            while (batch := await self._next()) is not None:
                error = await self._send(batch)
                async with self._changed:
                    self._waiting.settle(error)
                    self._changed.notify_all()
        except BaseException:
            self._task = None
            self._waiting.abandon(NotPublished("The task that publishes was cancelled, or has failed."))
            async with self._changed:
                self._changed.notify_all()
            raise

    async def _next(self) -> Batch | None:
        if not self._waiting.full_batch:
            await self._hurry.wait(self._buffer.linger_seconds)
        async with self._changed:
            batch = self._waiting.take()
            if batch is None:
                self._task = None
            self._changed.notify_all()
            return batch


def _flush_at_exit(found: weakref.ref[BackgroundThread]) -> None:
    """A client that is not there any more has no thread, and so nothing waits."""
    if (background := found()) is not None:
        background.flush_at_exit()


def _still(figures: PublishFigures) -> NotPublished:
    return NotPublished(f"{figures.waiting} messages still wait.", "Flush again.", figures.waiting)
