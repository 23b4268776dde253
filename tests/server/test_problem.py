"""Error responses: text for CDAP's clients, a problem document for JSON clients, and a code in both."""

from __future__ import annotations

import pytest

from tests.server.client import Client

MISSING = "/v1/namespaces/default/topics/missing"
CASES = [
    ("PUT", "/v1/namespaces/default/topics/any", b'{"ttl": 0}', 400, "TMS-BAD-REQUEST"),
    ("GET", "/v2", b"", 404, "TMS-NO-ROUTE"),
    ("PATCH", MISSING, b"", 405, "TMS-METHOD-NOT-ALLOWED"),
]


@pytest.mark.parametrize("accept", ["application/json", "application/problem+json, */*;q=0.1"])
@pytest.mark.parametrize(("method", "path", "body", "status", "code"), CASES)
def test_error_is_a_problem_if_json_is_accepted(
    client: Client, method: str, path: str, body: bytes, status: int, code: str, accept: str
) -> None:
    text = client.ask(method, path, body).text
    answer = client.ask(method, path, body, accept=accept)
    problem = answer.json
    assert answer.headers["content-type"] == "application/problem+json"
    assert (problem["status"], problem["code"], answer.headers["x-tms-error"]) == (status, code, code)
    assert " ".join(filter(None, (problem["detail"], problem.get("hint")))) == text


def test_wrong_method_has_the_methods_of_the_path(client: Client) -> None:
    allowed = client.ask("PATCH", MISSING).headers["allow"]
    assert set(allowed.split(", ")) == {"GET", "PUT", "DELETE"}
