"""A node's small admin endpoint: is it alive, is it ready, what does it count, what state is it in.

Served from a thread of its own, so that it answers while the model computes.
"""

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import uvicorn
from fastapi import APIRouter, Body, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from connector import failpoints
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

STOP_TIMEOUT_SECONDS = 5.0
BACKLOG = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminView:
    """What the endpoint shows. The callables are called from the endpoint's thread."""

    not_ready_reason: Callable[[], str]
    """Empty when ready."""
    registry: CollectorRegistry
    debug_state: Callable[[], Mapping[str, object]] | None
    """None: nothing under /debug is served."""


def create_admin_app(view: AdminView) -> FastAPI:
    """The routes find `view` on the app: FastAPI keeps route functions for ever, and a closure would keep the node."""
    app = FastAPI(title="pdserve node", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.view = view
    app.include_router(_status)
    if view.debug_state is not None:
        app.include_router(_debug, prefix="/debug")
    return app


_status = APIRouter()
_debug = APIRouter()


def _view(request: Request) -> AdminView:
    view = request.app.state.view
    assert isinstance(view, AdminView)
    return view


@_status.get("/health")
@_status.head("/health")
def health() -> Response:
    return Response()


@_status.get("/ready")
@_status.head("/ready")
def ready(request: Request) -> JSONResponse:
    reason = _view(request).not_ready_reason()
    return JSONResponse({"ready": not reason, "reason": reason}, status_code=503 if reason else 200)


@_status.get("/metrics")
def metrics(request: Request) -> Response:
    return Response(generate_latest(_view(request).registry), media_type=CONTENT_TYPE_LATEST)


@_debug.get("/state")
def state(request: Request) -> JSONResponse:
    debug_state = _view(request).debug_state
    return JSONResponse(dict(debug_state()) if debug_state is not None else {})


@_debug.get("/failpoints")
def list_failpoints() -> JSONResponse:
    return JSONResponse(failpoints.describe())


@_debug.post("/failpoints")
def change_failpoints(arm: str = Body(""), disarm: list[str] = Body([])) -> JSONResponse:  # noqa: B008
    """`{"arm": spec, "disarm": [name, ...]}`; to disarm releases a pause."""
    try:
        failpoints.arm(arm)
    except ConfigError as error:
        return JSONResponse({"error": str(error)}, status_code=400)
    for name in disarm:
        failpoints.disarm(name)
    return list_failpoints()


class AdminEndpoint:
    """Listens as soon as it is made. Raises `ConfigError` naming --admin-port if it cannot."""

    def __init__(self, host: str, port: int, view: AdminView) -> None:
        self._socket = _bind(host, port)
        bound_host, bound_port = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{bound_host}]' if ':' in bound_host else bound_host}:{bound_port}"
        config = uvicorn.Config(create_admin_app(view), log_level="warning", access_log=False, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="admin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(STOP_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            logger.error("the admin endpoint did not stop within %.0f s", STOP_TIMEOUT_SECONDS)
        self._socket.close()

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # At once: who is told the port may come before the serving thread does.
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"--admin-port: cannot listen on {host}:{port}: {error}") from error
    return listener
