"""What a server's settings leave open that an operator should know of, said once when it starts."""

from __future__ import annotations

from collections.abc import Iterator

from tms_core.settings.models import Settings, is_loopback, split_address


def exposed(settings: Settings) -> Iterator[str]:
    """A sentence for each thing that is open, or shut to everybody.

    None of it is refused, since what makes it safe may stand outside: a proxy that ends TLS, a network policy.
    """
    server, transactions = settings.server, settings.transactions
    if server.auth.kind != "none":
        if not is_loopback(server.host) and server.tls is None:
            yield (
                f"server.host is {server.host} and server.tls is null: tokens can be read on the network. "
                "Set server.tls, or let only the proxy that ends TLS reach this port"
            )
        if not server.auth.rules:
            yield "server.auth.rules is empty: no principal may do anything. Give at least one principal something"
    host, _ = split_address(transactions.thrift)
    if transactions.source == "manager" and not is_loopback(host) and transactions.token_file is None:
        yield (
            f"transactions.thrift is {transactions.thrift}, and Tephra's protocol has no authentication: everyone who "
            "reaches it can end transactions and have invalid ones seen. Bind it to 127.0.0.1, set "
            "transactions.token_file, or let only trusted machines reach it"
        )
