"""/docs: the API's description as one page of plain HTML. No script, nothing from elsewhere."""

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

Schema = Mapping[str, Any]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; color: #222 }
h2 { border-top: 1px solid #ccc; padding-top: 1em; font-size: 1.1em } h2 b { text-transform: uppercase; color: #06c }
code, pre { font-family: ui-monospace, monospace; font-size: 13px } pre { background: #f4f4f4; padding: .8em }
table { border-collapse: collapse; margin: .5em 0 } td { padding: .15em 1.2em .15em 0; vertical-align: top }
summary { cursor: pointer } .type { color: #666 }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } pre { background: #262626 } }
"""
_DEPTH = 6
"""How many schemas within schemas are written out."""


def render(document: Mapping[str, Any]) -> str:
    """The page for an OpenAPI document."""
    page = _Page(document)
    info = document["info"]
    title = f"{info['title']} {info['version']}"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>",
        f"<h1>{escape(title)}</h1><p>{escape(info.get('description', ''))}</p>",
        '<p>For machines: <a href="openapi.json">openapi.json</a></p>',
        *page.operations(),
        "<h2>Schemas</h2>",
        *page.schemas(),
        "</html>",
    ]
    return "\n".join(parts)


class _Page:
    def __init__(self, document: Mapping[str, Any]) -> None:
        self._paths = document["paths"]
        self._schemas = document.get("components", {}).get("schemas", {})

    def operations(self) -> Iterator[str]:
        for path, operations in self._paths.items():
            for method, operation in operations.items():
                lock = "" if not operation.get("security") else " &#128274;"
                yield f"<h2><b>{escape(method)}</b> <code>{escape(path)}</code>{lock}</h2>"
                yield f"<p>{escape(operation.get('description') or operation.get('summary', ''))}</p>"
                yield from self._body(path, operation.get("requestBody", {}))
                yield from self._responses(operation["responses"])

    def schemas(self) -> Iterator[str]:
        for name, schema in sorted(self._schemas.items()):
            yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
            yield f"<p>{escape(schema.get('description', ''))}</p>{self._fields(schema)}</details>"

    def _body(self, path: str, body: Schema) -> Iterator[str]:
        for content in body.get("content", {}).values():
            yield f"<p>Body: {self._type(content.get('schema', {}))}</p>"
            if "example" in content:
                example = json.dumps(content["example"])
                command = f"curl http://HOST:PORT{path} -H 'Content-Type: application/json' -d '{example}'"
                yield f"<pre>{escape(command)}</pre>"

    def _responses(self, responses: Mapping[str, Any]) -> Iterator[str]:
        yield "<table>"
        for status, response in responses.items():
            shapes = [
                f"<code>{escape(media)}</code> {self._type(content.get('schema', {}))}"
                for media, content in response.get("content", {}).items()
            ]
            yield f"<tr><td>{escape(status)}<td>{escape(response['description'])}<td>{'<br>'.join(shapes)}"
        yield "</table>"

    def _fields(self, schema: Schema) -> str:
        required = schema.get("required", ())
        rows = [
            f"<tr><td><code>{escape(name)}</code>{'' if name not in required else ' *'}"
            f"<td class=type>{self._type(field)}<td>{escape(field.get('description', ''))}"
            for name, field in schema.get("properties", {}).items()
        ]
        return f"<table>{''.join(rows)}</table>" if rows else f"<p class=type>{self._type(schema)}</p>"

    def _type(self, schema: Schema, depth: int = _DEPTH) -> str:
        """A schema in a few words, with links to the named ones."""
        if depth == 0 or not schema:
            return "any"
        match schema:
            case {"x-event-schema": event}:
                return f"events of {self._type(event)}"
            case {"$ref": ref}:
                name = escape(ref.rpartition("/")[2])
                return f'<a href="#{name}">{name}</a>'
            case {"anyOf": options} | {"oneOf": options}:
                return " or ".join(self._type(option, depth - 1) for option in options)
            case {"const": value}:
                return escape(json.dumps(value))
            case {"enum": values}:
                return " or ".join(escape(json.dumps(value)) for value in values)
            case {"type": "array", "items": item}:
                return f"list of {self._type(item, depth - 1)}"
            case {"type": "object", "additionalProperties": dict(value)}:
                return f"map to {self._type(value, depth - 1)}"
            case {"type": str(kind)}:
                return escape(kind)
        return "any"
