"""Messages that are published some time: a bounded buffer, and somebody who empties it.

A program that must not wait for the disk of another machine hands its messages over and goes on. What is bounded is
how many wait; what happens to the next one then is the program's choice, and whatever is not published is counted, and
told by ``flush`` and ``close``. A batch that was not answered is sent again, so a message may be there twice.

The thread (or task) that publishes lives as long as there is something to publish. So a program that ends without
closing its client ends when all of it is published, and an idle client has no thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from tms_core.client import calls
from tms_core.client.calls import Topic, topic_id
from tms_core.client.core import NOT_DONE, UNKNOWN, Core
from tms_core.client.values import Buffer, Limits
from tms_core.client.waiting import Batch, PublishFigures, Waiting
from tms_core.client.wire import run
from tms_core.errors import NotPublished, TmsError


class _Background:
    """What both publishers do: one batch after the other."""

    def __init__(self, core: Core, buffer: Buffer, limits: Limits) -> None:
        self._core = core
        self._retry = buffer.retry
        self._linger_seconds = buffer.linger_seconds
        self._waiting = Waiting(buffer, limits.request_bytes)
        self._stop = core.wire.stop()

    async def _send(self, batch: Batch) -> TmsError | None:
        """Publish a batch; what it failed of."""
        call = calls.publish(batch.topic, batch.payloads, None)
        for failures in range(1, self._retry.attempts + 1):
            try:
                await self._core.wire.ask(call)
            except (*NOT_DONE, *UNKNOWN) as error:
                if failures == self._retry.attempts:
                    return error
                self._waiting.retries += 1
                await self._stop.wait(self._retry.pause_seconds(failures, self._core.random))
            except TmsError as error:
                return error
            else:
                break
        return None


class BackgroundThread(_Background):
    """Publishes from a thread; any number of threads may hand over.

    Args:
        core: who publishes.
        buffer: how much may wait.
        limits: how much is sent at once.
    """

    def __init__(self, core: Core, buffer: Buffer, limits: Limits) -> None:
        super().__init__(core, buffer, limits)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def figures(self) -> PublishFigures:
        """What became of what it was given."""
        with self._changed:
            return self._waiting.figures

    def publish(self, topic: Topic, messages: Sequence[bytes]) -> None:
        """Hand messages over."""
        name = topic_id(topic)
        with self._changed:
            for message in messages:
                while not self._waiting.offer(name, message):
                    self._changed.wait()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="tms-publish")
                    self._thread.start()

    def flush(self, timeout_seconds: float | None) -> None:
        """Return when all that was handed over until now is published."""
        with self._changed:
            mark = self._waiting.mark()
            if not self._changed.wait_for(lambda: self._waiting.settled(mark), timeout_seconds):
                raise _still(self._waiting.figures)
            self._waiting.tell()

    def close(self) -> None:
        """Take no more, and return when all is published."""
        with self._changed:
            self._waiting.closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._changed:
            self._waiting.tell()

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
        if not self._waiting.full_batch and not self._waiting.closed:
            run(self._stop.wait(self._linger_seconds))
        with self._changed:
            batch = self._waiting.take()
            if batch is None:
                self._thread = None
            self._changed.notify_all()
            return batch


class BackgroundTask(_Background):
    """Publishes from a task of the loop; takes what :class:`BackgroundThread` takes."""

    def __init__(self, core: Core, buffer: Buffer, limits: Limits) -> None:
        super().__init__(core, buffer, limits)
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    @property
    def figures(self) -> PublishFigures:
        """What became of what it was given."""
        return self._waiting.figures

    async def publish(self, topic: Topic, messages: Sequence[bytes]) -> None:
        """Hand messages over."""
        name = topic_id(topic)
        async with self._changed:
            for message in messages:
                while not self._waiting.offer(name, message):
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
        """Take no more, and return when all is published."""
        async with self._changed:
            self._waiting.closed = True
            self._changed.notify_all()
        if self._task is not None:
            await asyncio.wait([self._task])
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
        if not self._waiting.full_batch and not self._waiting.closed:
            await self._stop.wait(self._linger_seconds)
        async with self._changed:
            batch = self._waiting.take()
            if batch is None:
                self._task = None
            self._changed.notify_all()
            return batch


def _still(figures: PublishFigures) -> NotPublished:
    return NotPublished(f"{figures.waiting} messages still wait.", "Flush again.", figures.waiting)
