"""One janitor of one store: questions, decisions and runs over the same things.

The commands, the daemon and the tests all come through here.
"""

from __future__ import annotations

from janitor.run.decisions import OperatorDecisions
from janitor.run.questions import Questions
from janitor.run.runs import Runs


class Engine(Questions, OperatorDecisions, Runs):
    """Answers for one store, and cleans it; each part is made of the same ``Deps`` and knows nothing of the others."""
