"""The HTTP application: routes over one service. State hangs on the app; the lifespan starts and stops its tasks."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, HTTPException, Request

from connector.link import Links
from server.body_limit import BodyLimitMiddleware
from server.chat import chat_routes
from server.completions import completion_routes
from server.http_errors import install_error_handlers
from server.info_routes import info_routes
from server.request_id import RequestIdMiddleware
from server.responses import responses_routes
from server.service import Service
from server.tokenize_routes import tokenize_routes
from server.version import package_version

logger = logging.getLogger(__name__)


def create_app(service: Service, links: Links) -> FastAPI:
    """`links` carries the messages to the nodes; the app dials over it, and its maker closes it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.fleet.start(links)
        yield
        await service.fleet.stop()

    app = FastAPI(
        title="pdserve",
        version=package_version(),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.add_middleware(BodyLimitMiddleware, max_bytes=service.config.max_body_bytes)
    app.add_middleware(RequestIdMiddleware)
    install_error_handlers(app, service)
    app.include_router(info_routes(service))
    for routes in (completion_routes, chat_routes, responses_routes, tokenize_routes):
        app.include_router(routes(service), dependencies=[Depends(_require_json)])
    return app


async def _require_json(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise HTTPException(415, "Content-Type must be application/json")
