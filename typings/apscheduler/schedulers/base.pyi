import abc
from collections.abc import Callable, Mapping
from datetime import datetime, tzinfo
from logging import Logger

from apscheduler.events import JobExecutionEvent
from apscheduler.executors.base import BaseExecutor
from apscheduler.job import Job
from apscheduler.triggers.base import BaseTrigger

class BaseScheduler(abc.ABC):
    def __init__(
        self,
        *,
        timezone: tzinfo | None = None,
        executors: Mapping[str, BaseExecutor] | None = None,
        logger: Logger | None = None,
    ) -> None: ...
    @property
    def running(self) -> bool: ...
    def start(self, paused: bool = False) -> None: ...
    @abc.abstractmethod
    def shutdown(self, wait: bool = True) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    @abc.abstractmethod
    def wakeup(self) -> None: ...
    def add_listener(self, callback: Callable[[JobExecutionEvent], None], mask: int) -> None: ...
    def add_job(
        self,
        func: Callable[..., object],
        trigger: BaseTrigger,
        args: tuple[object, ...] | None = None,
        *,
        id: str,  # noqa: A002
        name: str,
        misfire_grace_time: int | None = ...,
        coalesce: bool = ...,
        max_instances: int = ...,
        next_run_time: datetime = ...,
    ) -> Job: ...
    def modify_job(self, job_id: str, *, next_run_time: datetime) -> Job: ...
    def get_job(self, job_id: str) -> Job | None: ...
    def _process_jobs(self) -> float | None: ...
