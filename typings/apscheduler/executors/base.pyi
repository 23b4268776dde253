from logging import Logger

from apscheduler.schedulers.base import BaseScheduler

class BaseExecutor:
    _logger: Logger
    def start(self, scheduler: BaseScheduler, alias: str) -> None: ...
    def shutdown(self, wait: bool = True) -> None: ...
