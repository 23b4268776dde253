"""Runs named jobs, each by its own trigger, in threads of their own (APScheduler 3).

APScheduler brings the threads, the rule that a job never runs twice at a time, and the survival of jobs that raise.
What it does not handle is a clock that is set: it waits for a moment of the *wall* clock, so one
set back by an hour would put the next sweep off by an hour, and one set forward by a year would have it count a year of
missed runs one by one. So intervals are kept by the machine's monotonic clock here, crontab lines always count from
the present, and :meth:`Schedule.watch`, called every second or so, puts right what a changed clock has put wrong.
Traded: within that second a clock that was set forward may bring one run early, which does no harm.

Only this package knows APScheduler.
"""
