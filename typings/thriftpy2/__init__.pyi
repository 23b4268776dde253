"""What this project uses of thriftpy2, whose parts in C carry no types."""

from types import ModuleType
from typing import TextIO

def load_fp(source: TextIO, module_name: str) -> ModuleType: ...
