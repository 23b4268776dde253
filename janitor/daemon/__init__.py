"""Named jobs with triggers, each in a separate thread (APScheduler 3).

APScheduler has the threads, runs a job only once at a time, and survives jobs that raise. It does not handle a clock
that is set, because it waits for a time of the *wall* clock. A clock that is set back by an hour would delay the next
sweep by an hour, and a clock that is set forward by a year would make it count a year of missed runs. Therefore
intervals use the monotonic clock here, crontab lines always count from the current time, and :meth:`Schedule.watch`,
called about every second, corrects the effects of a changed clock. Traded: within that second, a clock that was set
forward may start one run early, which does no harm.

Only this package imports APScheduler.
"""
