"""The transaction service of another server, to which calls are passed on as they came."""

from __future__ import annotations

from pathlib import Path

from tms_core.errors import FormatError, TransactionError
from tms_core.transaction.codec import wire
from tms_core.transaction.codec.wire import MessageKind
from tms_core.transaction.rpc.line import (
    ANSWER_YOURSELF,
    NOT_HERE,
    IdleConnections,
    ServiceUnavailable,
    SocketConnection,
    as_text,
)

#: How long a call may take, in seconds, and connecting.
_SECONDS, _CONNECT_SECONDS = 30.0, 5.0
#: What an answer is shorter than that is none but a refusal, in bytes.
_SHORT_BYTES = 1024


class OtherService:
    """Passes calls on; threads may share it, and each call has a connection of its own.

    Args:
        address: ``HOST:PORT`` of the service.
        log: what tells its manager's log from that of any other store.
        token_file: of the token that it demands; None: it demands none.
    """

    def __init__(self, address: str, log: str, token_file: Path | None) -> None:
        self.address = address
        self._log = log
        self._token_file = token_file
        self._lines = IdleConnections(self._opened)

    def ask(self, frame: bytes) -> bytes:
        """Pass a call on; returns the answer.

        Raises:
            ServiceUnavailable: nothing was done.
            OSError, EOFError, FormatError: it is not known whether it was done.
        """
        with self._lines.one() as line:
            answer = line.pass_on(frame, _SECONDS)
            if _is_refused(answer):
                raise _unavailable(self.address, "it does not manage them any more")
        return answer

    def close(self) -> None:
        """Close what is open; closing twice is no error."""
        self._lines.close()

    def _opened(self) -> SocketConnection:
        try:
            line = SocketConnection(self.address, _CONNECT_SECONDS, self._token_file)
        except OSError as error:
            raise _unavailable(self.address, str(error)) from error
        try:
            line.ask(ANSWER_YOURSELF, (wire.string(1, self._log),), _CONNECT_SECONDS)
        except (OSError, EOFError, FormatError, TransactionError) as error:
            line.close()
            raise _unavailable(self.address, str(error)) from error
        return line


def _is_refused(answer: bytes) -> bool:
    """Whether the service has not even looked at the call."""
    if len(answer) > _SHORT_BYTES:
        return False
    found = wire.read_message(answer)
    return found.kind == MessageKind.EXCEPTION and as_text(found.fields, 1) == NOT_HERE


def _unavailable(address: str, reason: str) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"The server at {address} that manages the transactions cannot be asked: {reason}.",
        "Try again in some seconds.",
    )
