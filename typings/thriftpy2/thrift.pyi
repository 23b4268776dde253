from typing import Any

class TException(Exception): ...

class TApplicationException(TException):
    UNKNOWN_METHOD: int
    INTERNAL_ERROR: int
    type: int
    message: str | bytes | None

class TMessageType:
    CALL: int

class TClient:
    _service: Any
    _oprot: Any
    def _send(self, _api: str, **kwargs: Any) -> None: ...
    def _recv(self, _api: str) -> Any: ...
    def __init__(self, service: Any, iprot: Any) -> None: ...
    def __getattr__(self, name: str) -> Any: ...

class TProcessor:
    def __init__(self, service: Any, handler: object) -> None: ...
    def process(self, iprot: Any, oprot: Any) -> None: ...
