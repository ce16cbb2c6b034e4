"""What probes, scrapers and clients ask before they send work."""

from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from server.http_errors import RETRY_AFTER_SECONDS
from server.service import Service


def info_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    @router.head("/health", include_in_schema=False)
    @router.get("/ping")
    @router.head("/ping", include_in_schema=False)
    @router.post("/ping")
    async def health() -> Response:
        """Liveness only: the process answers."""
        return Response()

    @router.get("/ready")
    @router.head("/ready", include_in_schema=False)
    async def ready() -> Response:
        """Whether the whole ring can serve, and if not, why."""
        reason = service.not_ready_reason
        nodes = [asdict(status) for status in service.fleet.statuses()]
        content = {"ready": reason is None, "reason": reason, "nodes": nodes}
        if reason is None:
            return JSONResponse(content)
        return JSONResponse(content, status_code=503, headers={"retry-after": RETRY_AFTER_SECONDS})

    @router.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": package_version()}

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.expose(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": list(_cards(service))}

    @router.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        service.model_name(name)
        return next(card for card in _cards(service) if card["id"] == name)

    return router


def package_version() -> str:
    try:
        return version("pdserve")
    except PackageNotFoundError:
        return "unknown"


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
