"""Named jobs with triggers, each in a separate thread (APScheduler 3).

APScheduler provides the threads, runs each job at most once at a time, and survives errors of jobs. It does not handle
changes of the clock, because it waits for a time of the *wall* clock. A clock that is set back by an hour would delay
the next sweep by an hour, and after a clock that is set forward by a year it would count a year of missed runs.
Therefore intervals use the monotonic clock, crontab lines always count from the current time, and
:meth:`Schedule.watch`, called about every second, corrects the effects of a changed clock. Within that second, a clock
that was set forward may start one run early, which is harmless.

Only this package imports APScheduler.
"""
