"""A server's topics, for a shell to complete.

They are asked for without the client: importing it takes longer than a person waits for a key.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import quote, urlsplit

#: How long a shell waits for each server.
SECONDS = 2.0


def topics(urls: Sequence[str], namespace: str, token_file: Path | None, tls: ssl.SSLContext | None) -> list[str]:
    """The topics of a namespace, as the first server that answers has them; none where none does.

    Args:
        token_file: has the token to show.
        tls: by what a server's certificate is checked; by default what the machine trusts.
    """
    for url in urls:
        try:
            return [f"{namespace}:{name}" for name in _ask(url, namespace, token_file, tls)]
        except (OSError, HTTPException, ValueError):
            continue
    return []


def _ask(url: str, namespace: str, token_file: Path | None, tls: ssl.SSLContext | None) -> list[str]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(url)
    headers = {} if token_file is None else {"Authorization": f"Bearer {token_file.read_text('ascii').strip()}"}
    if parts.scheme == "https":
        connection: HTTPConnection = HTTPSConnection(parts.hostname, parts.port, timeout=SECONDS, context=tls)
    else:
        connection = HTTPConnection(parts.hostname, parts.port, timeout=SECONDS)
    try:
        path = f"{parts.path.rstrip('/')}/v1/namespaces/{quote(namespace, safe='')}/topics"
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        found = json.loads(answer.read()) if answer.status == 200 else None
    finally:
        connection.close()
    if not isinstance(found, list):
        raise ValueError(url)
    return [str(name) for name in found]
