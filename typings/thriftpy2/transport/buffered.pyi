from typing import Any

class TCyBufferedTransport:
    def __init__(self, trans: Any, buf_size: int = ...) -> None: ...
