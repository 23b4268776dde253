EVENT_JOB_EXECUTED: int
EVENT_JOB_ERROR: int

class JobExecutionEvent:
    job_id: str
    exception: BaseException | None
