"""pyarrow ships no types; what it makes is taken on trust."""

from typing import Any

def __getattr__(name: str) -> Any: ...
