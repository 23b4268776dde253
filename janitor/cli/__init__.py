"""The ``janitor`` command: one module for each verb, and shared code in ``context``, ``options`` and ``render``."""
