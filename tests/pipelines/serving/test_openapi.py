"""Requests made from the OpenAPI document: none brings the service to a 500, and every answer is one that the document names."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import schemathesis
import torch
from schemathesis.checks import CHECKS
from schemathesis.core.failures import FailureGroup

from tests.pipelines.serving.conftest import World
from tests.pipelines.serving.served import Client, Served

# The endless answer of the live page is tested with the page.
OPERATIONS = [
    ("POST", "/v1/events"), ("GET", "/v1/streams"), ("GET", "/v1/streams/{name}/forecast"), ("GET", "/v1/streams/{name}/history"),
    ("GET", "/v1/streams/{name}/anomalies"), ("GET", "/v1/streams/{name}/memory"), ("PUT", "/v1/streams/{name}/memory"),
    ("DELETE", "/v1/streams/{name}/memory"), ("POST", "/v1/score"), ("POST", "/invocations"), ("GET", "/v1/service"), ("GET", "/metrics"),
    ("GET", "/healthz"), ("GET", "/readyz"),
]  # fmt: skip


@pytest.fixture(scope="module")
def served(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("openapi") / "state", world.store) as running:
        running.client().push(*world.events(0, 60))
        yield running
        assert running.client().get("/v1/service")["ready"] is True
        assert running.stop() == 0
        assert "Traceback" not in running.log.read_text()


@pytest.fixture(scope="module")
def document(served: Served) -> schemathesis.BaseSchema:
    torch.set_flush_denormal(False)  # training sets it, and Hypothesis wants the smallest numbers
    return schemathesis.openapi.from_url(f"{served.address}openapi.json")


def test_the_document_names_every_route_with_examples(served: Served) -> None:
    document = Client(served.address).get("/openapi.json")
    named = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert named == {*OPERATIONS, ("GET", "/v1/live")}
    assert document["components"]["schemas"]["Events"]["examples"] and document["components"]["schemas"]["Score"]["examples"]
    for example, path in (("Events", "/v1/events"), ("Score", "/v1/score")):
        assert Client(served.address).call("POST", path, document["components"]["schemas"][example]["examples"][0])[0] == 200


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_made_from_the_document_breaks_it(document: schemathesis.BaseSchema, method: str, path: str) -> None:
    wanted = ("not_a_server_error", "status_code_conformance", "response_schema_conformance")
    checks = [check for check in CHECKS.get_all() if check.__name__ in wanted]
    assert len(checks) == len(wanted)

    @hypothesis.settings(
        max_examples=25, deadline=None, database=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(case=document[path][method].as_strategy())
    def every(case: schemathesis.Case) -> None:
        try:
            case.call_and_validate(checks=checks, timeout=30)
        except FailureGroup as failures:
            raise AssertionError([str(failure)[:400] for failure in failures.exceptions]) from None

    every()
