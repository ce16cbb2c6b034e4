"""The HTTP application: routes over one service. State hangs on the app; the lifespan starts and stops its tasks."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.middleware.cors import CORSMiddleware

from connector.link import Links
from server.api_keys import ApiKeys
from server.body_limit import BodyLimitMiddleware
from server.chat import chat_routes
from server.completions import completion_routes
from server.gates import AdmissionMiddleware, ApiKeyMiddleware
from server.http_errors import BugMiddleware, install_error_handlers
from server.http_settings import CorsConfig
from server.info_routes import info_routes
from server.openapi import install_openapi
from server.request_id import RequestIdMiddleware
from server.responses import responses_routes
from server.service import Service
from server.tokenize_routes import tokenize_routes
from server.version import package_version

logger = logging.getLogger(__name__)


def create_app(service: Service, links: Links, keys: ApiKeys | None = None) -> FastAPI:
    """`links` carries the messages to the nodes; the app dials over it, and its maker closes it. No `keys`: everybody
    may ask."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.fleet.start(links)
        yield
        await service.fleet.stop()
        service.grammars.close()

    app = FastAPI(
        title="pdserve",
        version=package_version(),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    app.state.service = service
    _add_middleware(app, service, keys)
    install_error_handlers(app, service)
    app.include_router(info_routes(service))
    for routes in (completion_routes, chat_routes, responses_routes, tokenize_routes):
        app.include_router(routes(service), dependencies=[Depends(_require_json)])
    install_openapi(app, needs_key=bool(keys))
    return app


def _add_middleware(app: FastAPI, service: Service, keys: ApiKeys | None) -> None:
    """The innermost first. Preflights carry no key, and a refusal must be readable for the page that it is meant for:
    so CORS is outside of the keys, which come before anything that costs work."""
    app.add_middleware(BodyLimitMiddleware, max_bytes=service.config.limits.max_body_bytes)
    app.add_middleware(AdmissionMiddleware, admission=service.admission)
    if keys:
        app.add_middleware(ApiKeyMiddleware, keys=keys, num_refused=service.metrics.unauthorized)
    app.add_middleware(BugMiddleware)
    if service.config.cors.allowed_origins:
        _add_cors(app, service.config.cors)
    app.add_middleware(RequestIdMiddleware)


def _add_cors(app: FastAPI, rules: CorsConfig) -> None:
    app.add_middleware(
        CORSMiddleware,
        allow_origins=rules.allowed_origins,
        allow_methods=rules.allowed_methods or ("*",),
        allow_headers=rules.allowed_headers or ("*",),
        allow_credentials=rules.allow_credentials,
        expose_headers=("x-request-id", "retry-after", "traceparent"),
    )


async def _require_json(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise HTTPException(415, "Content-Type must be application/json")
