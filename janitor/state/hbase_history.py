"""What the memory in HBase keeps of the past: runs, the ledger of what they took, announcements.

History grows, so it is rows of its own and not part of what hangs on the root. Numbers and times in keys are
big-endian, and turned over where the newest shall come first. A finished run is a row, and a second one finds it by
time; runs that go on are few and a value beside the others. Entries of the ledger lie together as they were added, in
pages, in the order of their numbers; each has a row of its own under its topic, and each run leads to its pages.
"""

from __future__ import annotations


