"""Where a request for work waits for nothing: it is taken in, or refused before its body is read."""

from starlette.types import ASGIApp, Receive, Scope, Send

from server.admission import Admission
from server.api_keys import OPEN_PATHS
from server.http_errors import error_response


class AdmissionMiddleware:
    """Counts and bounds what is under way."""

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
