from datetime import datetime

class Job:
    id: str
    next_run_time: datetime | None
