from apscheduler.executors.base import BaseExecutor

class ThreadPoolExecutor(BaseExecutor):
    def __init__(self, max_workers: int = 10) -> None: ...
