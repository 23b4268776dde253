"""Request and response bodies in CDAP's Avro encoding, without the codec of the server."""

from __future__ import annotations

MAX_INT = b"\x00\xfe\xff\xff\xff\x0f"
#: A poll of all messages.
POLL_ALL = b"\x04\x01" + MAX_INT + b"\x02"


def long(value: int) -> bytes:
    """Return a zigzag-encoded number."""
    rest = value * 2 if value >= 0 else -value * 2 - 1
    found = []
    while rest > 127:
        found.append(rest % 128 + 128)
        rest //= 128
    return bytes([*found, rest])


def block(items: list[bytes], *, sized: bool = False) -> bytes:
    """Return a block of an array of byte strings, optionally with its size (a negative count)."""
    body = b"".join(long(len(item)) + item for item in items)
    return long(-len(items)) + long(len(body)) + body if sized else long(len(items)) + body


def decoded(response: bytes) -> list[tuple[bytes, bytes]]:
    """Return the id and the payload of each message in a response to a poll."""
    found, at = [], 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = response[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value // 2 if value % 2 == 0 else -(value // 2) - 1

    def data() -> bytes:
        nonlocal at
        size = number()
        at += size
        return response[at - size : at]

    while count := number():
        assert count > 0
        found += [(data(), data()) for _ in range(count)]
    assert at == len(response)
    return found


def publish_body(*messages: bytes, pointer: int | None = None) -> bytes:
    head = b"\x02" if pointer is None else b"\x00" + long(pointer)
    return head + (block(list(messages)) if messages else b"") + b"\0"
