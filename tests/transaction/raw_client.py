"""A raw client of the transaction service, which sends and receives bytes, and a client of thriftpy2."""

from __future__ import annotations

import io
import socket
from functools import cache
from importlib.resources import files
from types import ModuleType
from typing import Any

import thriftpy2
from thriftpy2.protocol import TBinaryProtocolFactory
from thriftpy2.rpc import make_client
from thriftpy2.transport import TFramedTransportFactory

from tests.support import PATIENCE_SECONDS
from tms_core.transaction.codec import wire
from tms_core.transaction.codec.wire import MessageKind
from tms_core.transaction.rpc.connection import LENGTH
from tms_core.transaction.rpc.service import TransactionService


@cache
def load_interface() -> ModuleType:
    """Return ``transaction.thrift`` of the package, as thriftpy2 loads it."""
    source = (files("tms_core.transaction") / "transaction.thrift").read_text(encoding="utf-8")
    return thriftpy2.load_fp(io.StringIO(source), module_name="tms_transactions_thrift")


def make_thrift_client(service: TransactionService) -> Any:
    return make_client(
        load_interface().TTransactionServer,
        "127.0.0.1",
        service.port,
        timeout=round(PATIENCE_SECONDS * 1000),
        trans_factory=TFramedTransportFactory(),
        proto_factory=TBinaryProtocolFactory(),
    )


def connect(service: TransactionService) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.port), PATIENCE_SECONDS)


def encode_call(name: str, *fields: bytes, number: int = 1) -> bytes:
    data = wire.message(MessageKind.CALL, name, number, *fields)
    return LENGTH.pack(len(data)) + data


STATUS = encode_call("status")


def read_response(connection: socket.socket) -> wire.RpcMessage:
    return wire.read_message(receive(connection, int.from_bytes(receive(connection, 4))))


def call_service(connection: socket.socket, data: bytes = STATUS) -> wire.RpcMessage:
    connection.sendall(data)
    return read_response(connection)


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        assert more, "the service closed the connection"
        data += more
    return data


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
