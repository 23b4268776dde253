from typing import Any

def make_client(
    service: Any, host: str, port: int, *, timeout: int, trans_factory: object, proto_factory: object
) -> Any: ...
