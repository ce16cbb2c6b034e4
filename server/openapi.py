"""/openapi.json and /docs. A route says what its answer is when all went well (`answers`); what can go wrong follows
from what kind of route it is, and is added here for all of them."""

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.docs_page import render
from server.gates import OPEN_PATHS
from server.response_schema import ChatCompletionChunk, CompletionChunk, ErrorResponse
from server.responses_schema import ResponseEvent

DESCRIPTION = (
    "OpenAI-compatible completions from a ring of prefill and decode nodes. Unknown fields of a body are ignored, "
    "fields that would change the answer and are not supported are refused by name. Every response carries "
    "X-Request-Id: the request's own, if it has a printable one of at most 128 characters. A valid traceparent is "
    "handed on to the nodes and echoed."
)
DONE = (
    "Server-sent events. The data of each is one object of the given schema, or an error; the last is [DONE], except "
    "for /v1/responses."
)
SECURITY = "ApiKey"
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

# What each kind of route may answer besides its success.
_ALWAYS = (400, 408, 431, 500)
_CLOSED = (401,)
_NAMED = (404,)
_WORK = (404, 413, 415, 429, 502, 503, 504)

_MEANINGS = {
    400: "Malformed request; `param` names the field.",
    401: "No valid API key.",
    404: "There is no such model.",
    408: "The request did not arrive in time.",
    413: "The body is too long.",
    415: "The body is not application/json.",
    429: "Too much is under way. Nothing was done.",
    431: "The request line and headers are too long.",
    500: "A fault of ours, or KV that could not be loaded under the policy `fail`.",
    502: "A node was lost or could not be reached.",
    503: "No node is ready, or the server is shutting down.",
    504: "Not finished within the time limit.",
}


def answers(
    model: type[BaseModel], *, events: type[BaseModel] | None = None, example: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Keyword arguments of a route: what it answers, whole and as the events of a stream, and a body to try."""
    success: dict[str, Any] = {"model": model}
    if events is not None:
        success["content"] = {"text/event-stream": {"schema": _event_schema(events)}}
    arguments: dict[str, Any] = {"response_model": None, "responses": {200: success}}
    if example is not None:
        arguments["openapi_extra"] = {"requestBody": {"content": {"application/json": {"example": example}}}}
    return arguments


def _event_schema(events: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI before 3.2 describes each event of a stream where other answers have the whole."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_ref(events), _ref(ErrorResponse)]},
    }
    return {
        "type": "object",
        "description": DONE,
        "properties": {"event": {"type": "string"}, "data": {"anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
        "x-event-schema": _ref(events),
    }


def install_openapi(app: FastAPI, *, needs_key: bool) -> None:
    """Once all routes are there."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(generate(), needs_key)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    _add_docs(app, openapi)


def _add_docs(app: FastAPI, openapi: Callable[[], dict[str, Any]]) -> None:
    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(render(openapi()), headers={"content-security-policy": CONTENT_POLICY})


def _complete(document: dict[str, Any], needs_key: bool) -> dict[str, Any]:
    document["info"]["description"] = DESCRIPTION
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for ours in ("HTTPValidationError", "ValidationError"):
        # FastAPI's own shape of an error, which this server does not have.
        schemas.pop(ours, None)
    schemas |= _schemas(ErrorResponse, CompletionChunk, ChatCompletionChunk, ResponseEvent)
    components["securitySchemes"] = {SECURITY: {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            is_open = path in OPEN_PATHS
            if not is_open:
                operation["security"] = [{SECURITY: []}] + ([] if needs_key else [{}])
            _add_errors(operation, _statuses(path, method, is_open))
    return document


def _statuses(path: str, method: str, is_open: bool) -> list[int]:
    statuses = [*_ALWAYS, *(() if is_open else _CLOSED)]
    if method == "post" and not is_open:
        statuses += _WORK
    elif "{" in path:
        statuses += _NAMED
    return sorted(statuses)


def _add_errors(operation: dict[str, Any], statuses: list[int]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    for status in statuses:
        content = {"application/json": {"schema": _ref(ErrorResponse)}}
        responses.setdefault(str(status), {"description": _MEANINGS[status], "content": content})
    for status, response in responses.items():
        headers = response.setdefault("headers", {})
        headers["X-Request-Id"] = {"schema": {"type": "string"}}
        if status in ("429", "503"):
            headers["Retry-After"] = {"schema": {"type": "string"}, "description": "Seconds."}
        response["description"] = response.get("description") or HTTPStatus(int(status)).phrase


def _schemas(*models: type[BaseModel]) -> dict[str, Any]:
    _, definitions = models_json_schema(
        [(model, "serialization") for model in models], ref_template="#/components/schemas/{model}"
    )
    return dict(definitions["$defs"])


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
