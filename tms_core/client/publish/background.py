"""Publishing in the background: a bounded buffer of messages, and the thread or task that sends them.

A program that must not wait for the server's disk queues its messages and continues. The buffer is bounded, and the
program chooses the policy for a full buffer. The client counts unpublished messages; ``flush`` and ``close`` report
them. A batch without a response is sent again, so a message may be published twice.

The publishing thread (or task) lives while messages wait, so an idle client has no thread. A program that exits without
closing its client waits for unpublished messages, at most ``close_seconds``. The thread is a daemon, because otherwise
a server that hangs would block the exit.

A forked process has a copy of its parent's memory, but not its threads. Its buffer starts empty, because the parent
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
from tms_core.client.publish.buffer import DueCallback, MessageBatch, MessageBuffer, OnDelivery, PublishFigures
from tms_core.client.transactions.partitions import send_to_partition
from tms_core.errors import BufferFull, NotPublished, TmsError
from tms_core.topic import TopicId

logger = logging.getLogger(__name__)


class _Background:
    """The base class of both publishers, which sends batches one by one."""

    def __init__(self, core: Core, options: Options) -> None:
        self._core = core
        self._buffer = options.buffer
        self._close_seconds = options.timeouts.close_seconds
        self._reset()

    def _reset(self) -> None:
        self._waiting = MessageBuffer(self._buffer, self._core.limits.request_bytes)
        self._stop = self._core.wire.stop()
        # Once this signal is set, batches do not wait for more messages.
        self._send_now = self._core.wire.stop()

    async def _send(self, batch: MessageBatch) -> TmsError | None:
        """Publish a batch and return its error, so that a failed batch does not stop the others."""
        try:
            await self._publish_with_retries(batch)
        except TmsError as error:
            return error
        except Exception as error:
            logger.exception("publishing failed")
            return NotPublished(f"{type(error).__name__}: {error}")
        return None

    async def _publish_with_retries(self, batch: MessageBatch) -> None:
        """Publish a batch; retry for ``Buffer.delivery_seconds``, and once more after that time."""
        retry, core = self._buffer.retry, self._core
        deadline, number = core.monotonic() + self._buffer.delivery_seconds, next(core.turns)

        async def send(topic: TopicId) -> None:
            await core.send(calls.publish(topic, batch.payloads, batch.ttl_seconds))

        for failures in count(1):
            is_last = core.monotonic() >= deadline
            try:
                await send_to_partition(core, batch.topic, number, send)
                break
            except (*NOT_DONE, *UNKNOWN) as error:
                if is_last or not retry.again(failures):
                    raise
                self._waiting.retries += 1
                pause = retry.pause_seconds(failures, core.random, retry_seconds_of(error))
                await self._stop.wait(min(pause, max(0.0, deadline - core.monotonic())))

    def _call_callbacks(self, callbacks: Sequence[DueCallback]) -> None:
        """Call callbacks with the outcomes of their messages; an error in a callback does not affect the others."""
        for on_delivery, payload, error in callbacks:
            try:
                on_delivery(payload, error)
            except Exception:
                logger.exception("the function on_delivery failed")

    def _abandon_waiting(self) -> None:
        """Abandon the waiting messages after ``Timeouts.close_seconds``."""
        reason = f"the server did not respond within {self._close_seconds:g} s of closing (Timeouts.close_seconds)."
        self._waiting.abandon(NotPublished(reason))


class BackgroundThread(_Background):
    """A publisher that sends from its own thread; any number of threads may queue messages."""

    def __init__(self, core: Core, options: Options) -> None:
        super().__init__(core, options)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._forked = threading.Lock()
        self._at_exit = weakref.finalize(self, _flush_at_exit, weakref.ref(self))

    @property
    def figures(self) -> PublishFigures:
        """Return the counts of queued, published, dropped and failed messages."""
        with self._lock_of_process():
            return self._waiting.figures

    def publish(
        self,
        topic: Topic,
        messages: Sequence[bytes],
        ttl: timedelta | int | str | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Queue messages for the background, after the buffer has room for them or drops some (``WhenFull``)."""
        name, payloads = topic_id(topic), payloads_of(messages)
        ttl_seconds = None if ttl is None else seconds(ttl)
        try:
            with self._lock_of_process():
                for payload in payloads:
                    while not self._waiting.offer(name, payload, ttl_seconds, on_delivery):
                        self._wait_for_space()
                    if self._thread is None:
                        thread = threading.Thread(target=self._work, name="tms-publish", daemon=True)
                        # Assign after the start: if the start fails, the next message starts a thread.
                        thread.start()
                        self._thread = thread
        finally:
            self._report_outcomes()

    def flush(self, timeout_seconds: float | None) -> None:
        """Wait until all messages queued before the call are published.

        Raises:
            NotPublished: the timeout expired, or some messages failed.
        """
        with self._lock_of_process():
            mark = self._waiting.mark()
            if not self._changed.wait_for(lambda: self._waiting.is_settled(mark), timeout_seconds):
                raise _unpublished_error(self._waiting.figures)
            self._waiting.raise_failures()

    def close(self) -> None:
        """Reject further messages, and wait for the queued ones, at most ``Timeouts.close_seconds``.

        Raises:
            NotPublished: some messages were not published.
        """
        self._at_exit.detach()
        with self._lock_of_process():
            self._waiting.closed = True
            self._send_now.set()
            self._changed.notify_all()
            mark = self._waiting.mark()
            is_late = not self._changed.wait_for(lambda: self._waiting.is_settled(mark), self._close_seconds)
            if is_late:
                self._abandon_waiting()
                self._changed.notify_all()
        if is_late:
            self._report_outcomes()
        with self._lock_of_process():
            self._waiting.raise_failures()

    def flush_at_exit(self) -> None:
        """Publish the queued messages when the program exits without closing its client."""
        with self._lock_of_process():
            self._send_now.set()
        try:
            self.flush(self._close_seconds)
        except NotPublished as error:
            logger.error("the program exits with unpublished messages: %s", error)

    def _wait_for_space(self) -> None:
        if threading.current_thread() is self._thread:
            # Only this thread frees space, so waiting for it here would be a deadlock.
            raise BufferFull("The buffer is full, and on_delivery cannot wait.", "Publish from another thread.")
        self._changed.wait()

    def _report_outcomes(self) -> None:
        """Call the due callbacks without the lock, because they may take long or publish messages."""
        with self._lock_of_process():
            callbacks = self._waiting.callbacks()
        self._call_callbacks(callbacks)
        if callbacks:
            with self._lock_of_process():
                self._waiting.mark_reported()
                self._changed.notify_all()

    def _lock_of_process(self) -> threading.Condition:
        """Return the lock of the buffer; a forked process gets a new lock and a new buffer."""
        # A thread of the parent may have held the lock during the fork; the copy would then stay locked forever.
        if self._process != os.getpid():
            with self._forked:
                if self._process != os.getpid():
                    closed = self._waiting.closed
                    self._reset()
                    self._waiting.closed = closed
                    self._thread = None
                    self._changed = threading.Condition()
                    self._process = os.getpid()
        return self._changed

    def _work(self) -> None:
        try:
            while (batch := self._take_batch()) is not None:
                error = run(self._send(batch))
                with self._changed:
                    self._waiting.settle(error)
                # Call the callbacks before `flush` wakes up, because it guarantees that they were called.
                self._report_outcomes()
                with self._changed:
                    self._changed.notify_all()
        except BaseException:
            with self._changed:
                self._thread = None
                self._waiting.abandon(NotPublished("The publishing thread failed."))
                self._changed.notify_all()
            self._report_outcomes()
            raise

    def _take_batch(self) -> MessageBatch | None:
        if not self._waiting.has_full_batch:
            run(self._send_now.wait(self._buffer.linger_seconds))
        with self._changed:
            batch = self._waiting.take()
            if batch is None:
                # Under the lock that guards the buffer, so that the next queued message starts a new thread.
                self._thread = None
            self._changed.notify_all()
            return batch


class BackgroundTask(_Background):
    """A publisher that sends from a task of the event loop."""

    def __init__(self, core: Core, options: Options) -> None:
        super().__init__(core, options)
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    @property
    def figures(self) -> PublishFigures:
        """Return the counts of queued, published, dropped and failed messages."""
        return self._waiting.figures

    async def publish(
        self,
        topic: Topic,
        messages: Sequence[bytes],
        ttl: timedelta | int | str | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Queue messages for the background, after the buffer has room for them or drops some (``WhenFull``)."""
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
            self._report_outcomes()

    async def flush(self, timeout_seconds: float | None) -> None:
        """Wait until all messages queued before the call are published.

        Raises:
            NotPublished: the timeout expired, or some messages failed.
        """
        async with self._changed:
            mark = self._waiting.mark()
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self._changed.wait_for(lambda: self._waiting.is_settled(mark))
            except TimeoutError as error:
                raise _unpublished_error(self._waiting.figures) from error
            self._waiting.raise_failures()

    async def close(self) -> None:
        """Reject further messages, and wait for the queued ones, at most ``Timeouts.close_seconds``.

        Raises:
            NotPublished: some messages were not published.
        """
        async with self._changed:
            self._waiting.closed = True
            self._send_now.set()
            self._changed.notify_all()
        if self._task is not None:
            _, late = await asyncio.wait([self._task], timeout=self._close_seconds)
            if late:
                self._abandon_waiting()
                self._report_outcomes()
            for task in late:
                task.cancel()
                await asyncio.wait(late)
        self._waiting.raise_failures()

    def _report_outcomes(self) -> None:
        """Call the due callbacks."""
        if callbacks := self._waiting.callbacks():
            self._call_callbacks(callbacks)
            self._waiting.mark_reported()

    async def _work(self) -> None:
        try:
            while (batch := await self._take_batch()) is not None:
                error = await self._send(batch)
                async with self._changed:
                    self._waiting.settle(error)
                    self._report_outcomes()
                    self._changed.notify_all()
        except BaseException:
            self._task = None
            self._waiting.abandon(NotPublished("The publishing task was cancelled, or it failed."))
            self._report_outcomes()
            async with self._changed:
                self._changed.notify_all()
            raise

    async def _take_batch(self) -> MessageBatch | None:
        if not self._waiting.has_full_batch:
            await self._send_now.wait(self._buffer.linger_seconds)
        async with self._changed:
            batch = self._waiting.take()
            if batch is None:
                self._task = None
            self._changed.notify_all()
            return batch


def _flush_at_exit(reference: weakref.ref[BackgroundThread]) -> None:
    """Publish the queued messages at exit; a garbage-collected publisher has none."""
    if (background := reference()) is not None:
        background.flush_at_exit()


def _unpublished_error(figures: PublishFigures) -> NotPublished:
    return NotPublished(f"{figures.waiting} messages are still queued.", "Use a longer timeout.", figures.waiting)
