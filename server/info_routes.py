"""What probes, scrapers and clients ask before they send work."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from server.http_errors import RETRY_AFTER_SECONDS
from server.openapi import answers
from server.response_schema import Load, ModelCard, ModelList, Readiness, Version
from server.service import Service
from server.version import package_version


def info_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health", response_class=Response)
    @router.head("/health", response_class=Response)
    @router.get("/ping", response_class=Response)
    @router.head("/ping", response_class=Response)
    @router.post("/ping", response_class=Response)
    async def health() -> Response:
        """Liveness only: the process answers."""
        return Response()

    @router.get("/ready", responses={200: {"model": Readiness}, 503: {"model": Readiness}})
    @router.head("/ready")
    async def ready() -> Response:
        """Whether the whole ring can serve, and if not, why."""
        reason = service.not_ready_reason
        nodes = [asdict(status) for status in service.fleet.statuses()]
        content = {"ready": reason is None, "reason": reason, "nodes": nodes}
        if reason is None:
            return JSONResponse(content)
        return JSONResponse(content, status_code=503, headers={"retry-after": RETRY_AFTER_SECONDS})

    @router.get("/version", **answers(Version))
    async def show_version() -> dict[str, str]:
        return {"version": package_version()}

    @router.get("/load", **answers(Load))
    async def load() -> dict[str, int]:
        """The requests for work that are under way here."""
        return {"server_load": service.admission.num_requests}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.expose(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/models", **answers(ModelList))
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": list(_cards(service))}

    @router.get("/v1/models/{name:path}", **answers(ModelCard))
    async def show_model(name: str) -> dict[str, Any]:
        service.model_name(name)
        return next(card for card in _cards(service) if card["id"] == name)

    return router


def _cards(service: Service) -> Iterator[dict[str, Any]]:
    for name in service.config.model_names:
        yield {
            "id": name,
            "object": "model",
            "created": service.started_at,
            "owned_by": "pdserve",
            "root": service.config.model,
            "parent": None,
            "max_model_len": service.fleet.max_model_len,
            "permission": [],
        }
