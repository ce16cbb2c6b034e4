"""The gates in front of the routes: who comes in, and how many. Both refuse before anything of a body is read.

They are closed by default. Open are, by exact path, what probes, scrapers and people who look for the way in need.
"""

from prometheus_client import Counter
from starlette.types import ASGIApp, Receive, Scope, Send

from server.admission import Admission
from server.api_keys import ApiKeys
from server.http_errors import error_response

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version", "/metrics", "/docs", "/openapi.json"})


class ApiKeyMiddleware:
    """Refuses before anything of the body is read."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, num_refused: Counter) -> None:
        self._app = app
        self._keys = keys
        self._num_refused = num_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        self._num_refused.inc()
        response = error_response(401, "a valid API key is required: Authorization: Bearer KEY")
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        return self._keys.accept(dict(scope["headers"]).get(b"authorization", b""))


class AdmissionMiddleware:
    """Counts and bounds the requests for work. There is no queue: each is taken in or refused, at once."""

    def __init__(self, app: ASGIApp, *, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        admission = self._admission
        if (reason := admission.refusal()) is not None:
            admission.reject()
            await error_response(429, reason)(scope, receive, send)
            return
        admission.num_requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            admission.num_requests -= 1
