"""Every error as OpenAI's clients expect it: a status and {"error": {message, type, param, code}}."""

import json
import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import ErrorKind, RequestError, ServingError
from server.generation import ClientGone
from server.kv_transfer import leg_of_invalid
from server.service import Service, UnknownModel

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
RETRY_AFTER_SECONDS = "1"

STATUS_OF_KIND: dict[ErrorKind, HTTPStatus] = {
    ErrorKind.INVALID_REQUEST: HTTPStatus.BAD_REQUEST,
    ErrorKind.OVERLOADED: HTTPStatus.TOO_MANY_REQUESTS,
    ErrorKind.KV_LOAD_FAILED: HTTPStatus.INTERNAL_SERVER_ERROR,
    ErrorKind.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
    ErrorKind.PEER_UNREACHABLE: HTTPStatus.BAD_GATEWAY,
    ErrorKind.NO_NODE_READY: HTTPStatus.SERVICE_UNAVAILABLE,
    ErrorKind.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
}
_TYPE_OF_STATUS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestEntityTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    431: "RequestHeaderFieldsTooLargeError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}

_NOT_SERVED = {
    "/v1/embeddings": "embeddings",
    "/v1/audio": "audio",
    "/v1/images": "images",
    "/v1/videos": "videos",
    "/v1/moderations": "moderations",
    "/v1/realtime": "realtime sessions",
    "/v1/files": "files",
    "/v1/batches": "batches",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/assistants": "assistants",
    "/v1/threads": "threads",
    "/v1/messages": "the messages API",
    "/v1/rerank": "reranking",
    "/rerank": "reranking",
    "/v1/score": "scores",
    "/score": "scores",
    "/pooling": "pooling",
    "/classify": "classification",
}
"""What clients of OpenAI-compatible servers probe for. 404, because clients take a 501 for a fault and repeat."""


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _TYPE_OF_STATUS.get(status, "APIError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def failure_body(error: ServingError | RequestError) -> dict[str, Any]:
    """What ended a request that had been sent to a node."""
    if isinstance(error, RequestError):
        return error_body(HTTPStatus.BAD_REQUEST, str(error), error.param)
    return error_body(STATUS_OF_KIND[error.kind], str(error))


def error_response(status: int, message: str, param: str | None = None) -> Response:
    headers = {"retry-after": RETRY_AFTER_SECONDS} if status in (429, 503) else None
    # Plain ASCII: the message may quote something of the request that is no valid Unicode.
    content = json.dumps(error_body(status, message, param), ensure_ascii=True)
    return Response(content, status_code=status, headers=headers, media_type="application/json")


def install_error_handlers(app: FastAPI, service: Service) -> None:
    """Maps every exception that a route may end with."""

    @app.exception_handler(RequestError)
    async def on_request_error(request: Request, error: RequestError) -> Response:
        return error_response(404 if isinstance(error, UnknownModel) else 400, str(error), error.param)

    @app.exception_handler(ServingError)
    async def on_serving_error(request: Request, error: ServingError) -> Response:
        logger.warning("request %s failed: %s", request.state.request_id, error)
        return error_response(STATUS_OF_KIND[error.kind], str(error))

    @app.exception_handler(ClientGone)
    async def on_client_gone(request: Request, error: ClientGone) -> Response:
        logger.info("request %s: %d, the client left", request.state.request_id, CLIENT_CLOSED_REQUEST)
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> Response:
        service.release(leg_of_invalid(error.body))
        message, param = _first_complaint(error.errors())
        return error_response(400, message, param)

    @app.exception_handler(HTTPException)
    async def on_http_exception(request: Request, error: HTTPException) -> Response:
        response = error_response(error.status_code, _message_of(error, request))
        response.headers.update(error.headers or {})
        return response


def _first_complaint(errors: Sequence[Any]) -> tuple[str, str | None]:
    """Message and field of the first thing that is wrong with a body."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON: {first['ctx']['error']}", None
    # Positions in long lists are kept, what pydantic adds for unions is not part of the field's name.
    path = [str(step) for step in first["loc"] if step != "body" and "[" not in str(step)]
    param = ".".join(path) or None
    if first["type"] == "missing" and param is None:
        return "a JSON body is required", None
    return f"{param or 'body'}: {first['msg']}", param


def _message_of(error: HTTPException, request: Request) -> str:
    match error.status_code:
        case 400 if isinstance(error.__cause__, UnicodeDecodeError):
            return "the body is not valid JSON: it is not UTF-8"
        case 400 if isinstance(error.__cause__, RecursionError):
            return "the body is not valid JSON that can be read: it is nested too deeply"
        case 404:
            return _no_such_path(request.url.path)
        case 405:
            return f"{request.url.path} does not take {request.method}"
        case _:
            return str(error.detail)


def _no_such_path(path: str) -> str:
    for prefix, what in _NOT_SERVED.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return f"{path} is not supported: this server generates text, it does not do {what}"
    return f"there is no {path}"


class BugMiddleware:
    """An exception that nothing else maps is a bug: it is logged, and the client gets an answer with all the headers
    that others have. In mid-response it goes on, and ends the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except Exception:
            if has_begun or scope["type"] != "http":
                raise
            logger.exception("request %s: a bug", scope["state"]["request_id"])
            await error_response(500, "internal error")(scope, receive, send)
