"""What /openapi.json promises, and whether a response keeps it."""

import copy
import json
from typing import Any

import httpx
from jsonschema import Draft202012Validator

from tests.server_rig import RunningServer, events_of


class PublishedSchema:
    """Checks responses. Stricter than what is published: a field that is not described is an error here."""

    def __init__(self, server: RunningServer) -> None:
        self.document = server.client.get("/openapi.json").raise_for_status().json()
        self._components = _closed(self.document["components"])

    def check(self, response: httpx.Response, path: str | None = None) -> None:
        """`path`: as the document has it, where the request's own is an instance of it."""
        request = response.request
        operation = self.document["paths"][path or request.url.path][request.method.lower()]
        promised = operation["responses"][str(response.status_code)]
        for header in promised["headers"]:
            assert header in response.headers
        media_type = response.headers.get("content-type", "").partition(";")[0]
        content = promised.get("content")
        if content is None:
            assert not response.content
            return
        schema = content[media_type].get("schema", {})
        if media_type == "text/event-stream":
            for event in events_of(response):
                self.validate(event, _ERROR if "error" in event else schema["x-event-schema"])
        elif media_type == "application/json":
            self.validate(response.json(), schema)

    def validate(self, value: Any, schema: Any) -> None:
        Draft202012Validator({**schema, "components": self._components}).validate(value)


_ERROR = {"$ref": "#/components/schemas/ErrorResponse"}


def _closed(schema: Any) -> Any:
    """The same, with every object closed against properties that it does not name."""
    closed = copy.deepcopy(schema)

    def close(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("properties"), dict):
                node.setdefault("additionalProperties", False)
            for value in node.values():
                close(value)
        elif isinstance(node, list):
            for value in node:
                close(value)

    close(closed)
    return closed


def refs_of(document: Any) -> set[str]:
    """Every `$ref` in it."""
    text = json.dumps(document)
    return {part.partition('"')[0] for part in text.split('"$ref": "')[1:]}
