"""The ``janitor`` command: one module a verb; what they share is in ``context``, ``options`` and ``render``."""
