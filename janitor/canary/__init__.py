"""A bird in the mine: messages of the janitor's own, published in order to be deleted, and watched.

Every figure of a sweep comes from the code that sweeps. This one does not: now and then a message is published that
carries in its payload when it is due, and then it is only looked for, by its key, until it is gone. So it says end to
end, with the clocks, the settings and the store there are, that nothing goes early, and how late it goes.

What is measured, and how well:

* *Early* means gone before it was due by the machine's running time, which nobody can set. The law goes by the wall
  clock, so a wall clock that was set forward by no more than the allowance excuses it. One that jumped further does
  not: it should have stopped the sweep (rule S7). Across a reboot there is only the wall clock. A message that goes
  between two looks, the first before and the second after it was due, does not count as early.
* *Late* is from when it was due until it was first missed, so the true lateness is less, by up to the time between
  two looks. Where a sweep lets a little gather first, where a topic is held or paused, that counts.
* A message is watched only after it was seen in the store, and whoever deletes it counts, CDAP as well.

The topic is named and marked in :mod:`janitor.own`. It is made as CDAP would make it, and taken back as CDAP would
delete it, by a negative generation, so that the janitor itself cleans its rows. A topic of that name which is not ours
is left alone, and nothing is ever written to any other. What is watched is kept in the memory; when that is lost, what
lies in the topic is watched from then on.
"""

from __future__ import annotations

from janitor.canary.bird import TOPIC, Canary
from janitor.canary.watch import figures

__all__ = ["TOPIC", "Canary", "figures"]
