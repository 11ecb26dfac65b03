"""schemathesis over the server's own OpenAPI document: whatever it makes up, no 5xx, and answers as documented."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from ddtree.errors import InvalidOption
from ddtree.server import create_app
from ddtree.server.options import ServerOptions

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
BOUNDED = settings(
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


ROUTES = ["POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models", "GET /v1/models/{model}",
          "GET /health", "GET /metrics", "GET /server_info", "POST /reset_prefix_cache"]  # fmt: skip


@pytest.fixture
def operations(engine, monkeypatch):
    """By name: what the document tells of each route."""
    check = engine.check

    def checked(prompt, params, speculation=None):
        """The scripted engine's tokens are characters; a real one knows of all its tokens, too."""
        if any(token > 0xD7FF for token in prompt):
            raise InvalidOption("token ids must be from 0 to 55295", param="prompt")
        check(prompt, params, speculation)

    monkeypatch.setattr(engine, "check", checked)
    monkeypatch.setattr(engine.text, "encode", lambda text: [ord(one) % 0xD800 for one in text])
    engine.max_model_len = 4000
    app = create_app(engine, ServerOptions(("scripted",), access_log=False))
    document = schemathesis.openapi.from_asgi("/openapi.json", app)
    found = [result.ok() for result in document.get_all_operations()]
    return {f"{one.method.upper()} {one.path}": one for one in found}


def test_the_routes_are_known(operations):
    assert sorted(operations) == sorted(ROUTES)


def sound(operation, mode):
    """Sends what schemathesis makes up for a route."""

    @BOUNDED
    @given(operation.as_strategy(generation_mode=mode))
    def check(case):
        case.call_and_validate(checks=CHECKS)

    check()


@pytest.mark.parametrize("route", ROUTES)
def test_what_fits_the_document(operations, route):
    sound(operations[route], GenerationMode.POSITIVE)


@pytest.mark.parametrize("route", [route for route in ROUTES if route.startswith("POST")])
def test_what_does_not_fit_it(operations, route):
    sound(operations[route], GenerationMode.NEGATIVE)
