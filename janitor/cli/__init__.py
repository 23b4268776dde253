"""The ``janitor`` command: one module for each verb, and shared code in ``options``, ``outcome`` and ``render``."""
