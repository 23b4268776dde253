"""Publishing in the background: a bounded buffer of messages, and the thread or task that sends them.

A program that must not wait for the disk of another machine queues its messages and continues. The buffer is bounded,
and the program chooses the treatment of further messages. The client counts unpublished messages; ``flush`` and
``close`` report them. A batch without a response is sent again, so a message may be published twice.

The publishing thread (or task) lives while messages wait, so an idle client has no thread. A program that exits without
closing its client waits for unpublished messages, at most ``close_seconds``. The thread is a daemon, because otherwise
a server that hangs would block the exit.

A forked process has the memory of its parent, but not its threads. Its buffer starts empty, because the parent
publishes the waiting messages.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from itertools import count

from tms_core.client.protocol import calls
from tms_core.client.protocol.calls import Topic, topic_id
from tms_core.client.protocol.core import NOT_DONE, UNKNOWN, Core, retry_seconds_of
from tms_core.client.protocol.endpoint import Options
from tms_core.client.protocol.messages import payloads_of, seconds
from tms_core.client.protocol.wire import run
from tms_core.client.publish.buffer import Fate, MessageBatch, MessageBuffer, OnDelivery, PublishFigures
from tms_core.client.transactions.partitions import to_partition
from tms_core.errors import BufferFull, NotPublished, TmsError
from tms_core.topic import TopicId

logger = logging.getLogger(__name__)


class _Background:
    """The part that both publishers share; sends one batch after the other."""

    def __init__(self, core: Core, options: Options) -> None:
        self._core = core
        self._buffer = options.buffer
        self._close_seconds = options.timeouts.close_seconds
        self._begin()

    def _begin(self) -> None:
        self._waiting = MessageBuffer(self._buffer, self._core.limits.request_bytes)
        self._stop = self._core.wire.stop()
        # When it is set, a batch is sent without waiting for more messages.
        self._hurry = self._core.wire.stop()

    async def _send(self, batch: MessageBatch) -> TmsError | None:
        """Publish a batch, and return its error; an error does not affect other batches."""
        try:
            await self._repeat(batch)
        except TmsError as error:
            return error
        except Exception as error:
            logger.exception("publishing failed")
            return NotPublished(f"{type(error).__name__}: {error}")
        return None

    async def _repeat(self, batch: MessageBatch) -> None:
        """Publish a batch; try again for ``Buffer.delivery_seconds``, and once more after that time."""
        retry, core = self._buffer.retry, self._core
        ends, number = core.monotonic() + self._buffer.delivery_seconds, next(core.turns)

        async def send(topic: TopicId) -> None:
            await core.send(calls.publish(topic, batch.payloads, batch.ttl_seconds))

        for failures in count(1):
            last = core.monotonic() >= ends
            try:
                await to_partition(core, batch.topic, number, send)
                break
            except (*NOT_DONE, *UNKNOWN) as error:
                if last or not retry.again(failures):
                    raise
                self._waiting.retries += 1
                pause = retry.pause_seconds(failures, core.random, retry_seconds_of(error))
                await self._stop.wait(min(pause, max(0.0, ends - core.monotonic())))

    def _report(self, fates: Sequence[Fate]) -> None:
        """Call the callbacks with the outcomes of messages; an error of a callback does not affect other messages."""
        for on_delivery, payload, error in fates:
            try:
                on_delivery(payload, error)
            except Exception:
                logger.exception("the function on_delivery failed")

    def _give_up(self) -> None:
        """Abandon the waiting messages because the time to close is over."""
        reason = f"there was no answer within {self._close_seconds:g} s of closing (Timeouts.close_seconds)."
        self._waiting.abandon(NotPublished(reason))


class BackgroundThread(_Background):
    """A publisher with a thread; any number of threads may queue messages."""

    def __init__(self, core: Core, options: Options) -> None:
        super().__init__(core, options)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._forked = threading.Lock()
        self._at_exit = weakref.finalize(self, _flush_at_exit, weakref.ref(self))

    @property
    def figures(self) -> PublishFigures:
        """Return counts of its messages: sent, failed, dropped."""
        with self._here():
            return self._waiting.figures

    def publish(
        self,
        topic: Topic,
        messages: Sequence[bytes],
        ttl: timedelta | int | str | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Hand messages over."""
        name, payloads = topic_id(topic), payloads_of(messages)
        ttl_seconds = None if ttl is None else seconds(ttl)
        try:
            with self._here():
                for payload in payloads:
                    while not self._waiting.offer(name, payload, ttl_seconds, on_delivery):
                        self._wait_for_room()
                    if self._thread is None:
                        thread = threading.Thread(target=self._work, name="tms-publish", daemon=True)
                        # Assign after the start: if the start fails, the next message tries again.
                        thread.start()
                        self._thread = thread
        finally:
            self._report_all()

    def flush(self, timeout_seconds: float | None) -> None:
        """Wait until all messages queued until now are published.

        Raises:
            NotPublished: the time is over, or some messages failed.
        """
        with self._here():
            mark = self._waiting.mark()
            if not self._changed.wait_for(lambda: self._waiting.settled(mark), timeout_seconds):
                raise _unpublished_error(self._waiting.figures)
            self._waiting.tell()

    def close(self) -> None:
        """Reject further messages, and wait until all are published, or the time to close is over.

        Raises:
            NotPublished: some messages were not published.
        """
        self._at_exit.detach()
        with self._here():
            self._waiting.closed = True
            self._hurry.set()
            self._changed.notify_all()
            mark = self._waiting.mark()
            late = not self._changed.wait_for(lambda: self._waiting.settled(mark), self._close_seconds)
            if late:
                self._give_up()
                self._changed.notify_all()
        if late:
            self._report_all()
        with self._here():
            self._waiting.tell()

    def flush_at_exit(self) -> None:
        """Publish the rest when the program exits without closing its client."""
        with self._here():
            self._hurry.set()
        try:
            self.flush(self._close_seconds)
        except NotPublished as error:
            logger.error("the program ends before all is published: %s", error)

    def _wait_for_room(self) -> None:
        if threading.current_thread() is self._thread:
            # This thread makes room; if it waited, it would wait forever.
            raise BufferFull("There is no room, and on_delivery cannot wait.", "Handle the message in another thread.")
        self._changed.wait()

    def _report_all(self) -> None:
        """Call the due callbacks without the lock, because they may take long or publish again."""
        with self._here():
            fates = self._waiting.fates()
        self._report(fates)
        if fates:
            with self._here():
                self._waiting.mark_reported()
                self._changed.notify_all()

    def _here(self) -> threading.Condition:
        """Return the lock of the buffer; in a forked process, a new lock of a new buffer."""
        # Another thread of the parent may have held the lock during the fork; the copy would stay locked forever.
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
                # Call the callbacks before `flush` wakes up: it promises that they were called.
                self._report_all()
                with self._changed:
                    self._changed.notify_all()
        except BaseException:
            with self._changed:
                self._thread = None
                self._waiting.abandon(NotPublished("The thread that publishes has failed."))
                self._changed.notify_all()
            self._report_all()
            raise

    def _next(self) -> MessageBatch | None:
        if not self._waiting.full_batch:
            run(self._hurry.wait(self._buffer.linger_seconds))
        with self._changed:
            batch = self._waiting.take()
            if batch is None:
                # Under the same lock as the empty buffer: a message that is queued after this starts a new thread.
                self._thread = None
            self._changed.notify_all()
            return batch


class BackgroundTask(_Background):
    """A publisher with a task of the event loop."""

    def __init__(self, core: Core, options: Options) -> None:
        super().__init__(core, options)
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    @property
    def figures(self) -> PublishFigures:
        """Return counts of its messages: sent, failed, dropped."""
        return self._waiting.figures

    async def publish(
        self,
        topic: Topic,
        messages: Sequence[bytes],
        ttl: timedelta | int | str | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Hand messages over."""
        name, payloads = topic_id(topic), payloads_of(messages)
        ttl_seconds = None if ttl is None else seconds(ttl)
        try:
            async with self._changed:
                for payload in payloads:
                    while not self._waiting.offer(name, payload, ttl_seconds, on_delivery):
                        await self._changed.wait()
                    if self._task is None:
                        self._task = asyncio.create_task(self._work(), name="tms-publish")
        finally:
            self._report_all()

    async def flush(self, timeout_seconds: float | None) -> None:
        """Wait until all messages queued until now are published.

        Raises:
            NotPublished: the time is over, or some messages failed.
        """
        async with self._changed:
            mark = self._waiting.mark()
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self._changed.wait_for(lambda: self._waiting.settled(mark))
            except TimeoutError as error:
                raise _unpublished_error(self._waiting.figures) from error
            self._waiting.tell()

    async def close(self) -> None:
        """Reject further messages, and wait until all are published, or the time to close is over.

        Raises:
            NotPublished: some messages were not published.
        """
        async with self._changed:
            self._waiting.closed = True
            self._hurry.set()
            self._changed.notify_all()
        if self._task is not None:
            _, late = await asyncio.wait([self._task], timeout=self._close_seconds)
            if late:
                self._give_up()
                self._report_all()
            for task in late:
                task.cancel()
                await asyncio.wait(late)
        self._waiting.tell()

    def _report_all(self) -> None:
        """Call the due callbacks."""
        if fates := self._waiting.fates():
            self._report(fates)
            self._waiting.mark_reported()

    async def _work(self) -> None:
        try:
            while (batch := await self._next()) is not None:
                error = await self._send(batch)
                async with self._changed:
                    self._waiting.settle(error)
                    self._report_all()
                    self._changed.notify_all()
        except BaseException:
            self._task = None
            self._waiting.abandon(NotPublished("The task that publishes was cancelled, or has failed."))
            self._report_all()
            async with self._changed:
                self._changed.notify_all()
            raise

    async def _next(self) -> MessageBatch | None:
        if not self._waiting.full_batch:
            await self._hurry.wait(self._buffer.linger_seconds)
        async with self._changed:
            batch = self._waiting.take()
            if batch is None:
                self._task = None
            self._changed.notify_all()
            return batch


def _flush_at_exit(found: weakref.ref[BackgroundThread]) -> None:
    """Publish the remaining messages at exit; a client that was garbage-collected has none."""
    if (background := found()) is not None:
        background.flush_at_exit()


def _unpublished_error(figures: PublishFigures) -> NotPublished:
    return NotPublished(f"{figures.waiting} messages still wait.", "Flush again.", figures.waiting)
