"""The ``tms`` command."""
