"""/openapi.json describes what is really answered, and /docs shows it without help from elsewhere."""

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from jsonschema import Draft202012Validator, ValidationError

from connector.kv_transfer_params import KVTransferParams
from connector.server_messages import TokenOutput, Tokens
from engine.errors import ErrorKind
from engine.request import SampledToken
from server.gates import OPEN_PATHS
from server.http_settings import AccessConfig
from tests.published_schema import PublishedSchema, refs_of
from tests.server_rig import FakeNode, RunningServer, running_server, write_model_directory

HELD = KVTransferParams(do_remote_prefill=True, remote_engine_id="d0@e0", remote_block_ids=[[1, 2]], remote_port=1)
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
WORK = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeNode, RunningServer, PublishedSchema]]:
    node = FakeNode()
    with running_server(write_model_directory(tmp_path_factory.mktemp("model")), [node.address]) as server:
        server.wait_ready()
        yield node, server, PublishedSchema(server)
    node.close()


@pytest.fixture
def node(shared: tuple[FakeNode, RunningServer, PublishedSchema]) -> FakeNode:
    node, server, _ = shared
    node.script = scored(server.encode("ab👍"))
    return node


@pytest.fixture
def server(shared: tuple[FakeNode, RunningServer, PublishedSchema]) -> RunningServer:
    return shared[1]


@pytest.fixture
def published(shared: tuple[FakeNode, RunningServer, PublishedSchema]) -> PublishedSchema:
    return shared[2]


def scored(ids: list[int]) -> Any:
    def script(node: FakeNode, generate: Any) -> None:
        tokens = [SampledToken(token_id, -0.5, ((token_id, -0.5), (5, float("-inf")))) for token_id in ids]
        held = HELD if generate.kv_transfer_params else None
        for position, token in enumerate(tokens):
            end: dict[str, Any] = {}
            if position == len(tokens) - 1:
                end = {"finish_reason": "stop", "stop_reason": ids[-1], "kv_transfer_params": held}
            node.send(Tokens(outputs=[TokenOutput(request_id=generate.request_id, tokens=[token], **end)]))

    return script


COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"logprobs": 1, "return_token_ids": True, "n": 2},
    {"echo": True, "stop": "b"},
    {"prompt": ["a", "b"]},
    {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1},
]
CHATS: list[dict[str, Any]] = [
    {},
    {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "n": 2},
    {"stop": "b"},
    {"kv_transfer_params": {"do_remote_decode": True}, "max_completion_tokens": 1},
]


@pytest.mark.parametrize("stream", [{}, {"stream": True}, STREAM])
@pytest.mark.parametrize("body", COMPLETIONS[:-1])
def test_completions(
    node: FakeNode, server: RunningServer, published: PublishedSchema, body: Any, stream: dict[str, Any]
) -> None:
    published.check(server.complete(**body, **stream))


@pytest.mark.parametrize("stream", [{}, {"stream": True}, STREAM])
@pytest.mark.parametrize("body", CHATS[:-1])
def test_chats(
    node: FakeNode, server: RunningServer, published: PublishedSchema, body: Any, stream: dict[str, Any]
) -> None:
    published.check(server.chat(**body, **stream))


def test_responses(node: FakeNode, server: RunningServer, published: PublishedSchema) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    for fields in ({}, {"instructions": "Be brief.", "temperature": 0.5}, {"tools": [tool]}, {"max_output_tokens": 0}):
        published.check(server.client.post("/v1/responses", json={"input": "Hi", **fields}))
    with server.client.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True}) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: ")]
    operation = published.document["paths"]["/v1/responses"]["post"]
    schema = operation["responses"]["200"]["content"]["text/event-stream"]["schema"]["x-event-schema"]
    for event in events:
        published.validate(event, schema)
        if "response" in event:
            published.validate(event["response"], {"$ref": "#/components/schemas/ResponseObject"})


def test_held_kv(node: FakeNode, server: RunningServer, published: PublishedSchema) -> None:
    for reply in (server.complete(**COMPLETIONS[-1]), server.chat(**CHATS[-1])):
        assert reply.json()["kv_transfer_params"]
        published.check(reply)


def test_an_error_in_mid_stream(node: FakeNode, server: RunningServer, published: PublishedSchema) -> None:
    def script(node: FakeNode, generate: Any) -> None:
        node.send_output(generate.request_id, [65])
        node.send_output(generate.request_id, finish_reason="error", error_kind=ErrorKind.INTERNAL, error="broke")

    node.script = script
    reply = server.complete(stream=True)
    assert '"error"' in reply.text
    published.check(reply)


@pytest.mark.parametrize("path", ["/ready", "/version", "/load", "/metrics", "/v1/models", "/health", "/ping"])
def test_what_is_asked_with_get(server: RunningServer, published: PublishedSchema, path: str) -> None:
    reply = server.client.get(path)
    assert reply.status_code == 200
    published.check(reply)


@pytest.mark.parametrize("method", ["HEAD", "GET", "POST"])
@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_probes(server: RunningServer, published: PublishedSchema, method: str, path: str) -> None:
    reply = server.client.request(method, path)
    if (method, path) == ("POST", "/health"):
        assert reply.status_code == 405
    else:
        assert (reply.status_code, reply.content) == (200, b"")
        published.check(reply)


@pytest.mark.parametrize(
    ("name", "status"), [("tiny", 200), ("alias/of-it", 200), ("alias%2Fof-it", 200), ("x/y", 404)]
)
def test_one_model(server: RunningServer, published: PublishedSchema, name: str, status: int) -> None:
    reply = server.client.get(f"/v1/models/{name}")
    assert reply.status_code == status
    published.check(reply, "/v1/models/{name}")
    if status == 200:
        assert set(reply.json()) == {
            "id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"
        }  # fmt: skip


def test_tokenize_and_back(server: RunningServer, published: PublishedSchema) -> None:
    for body in ({"prompt": "über"}, {"prompt": "über", "return_token_strs": True}):
        reply = server.client.post("/tokenize", json=body)
        assert reply.status_code == 200
        published.check(reply)
    published.check(server.client.post("/detokenize", json={"tokens": reply.json()["tokens"]}))


@pytest.mark.parametrize("path", WORK)
def test_the_examples_are_accepted(
    node: FakeNode, server: RunningServer, published: PublishedSchema, path: str
) -> None:
    content = published.document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    published.validate(content["example"], content["schema"])
    reply = server.client.post(path, json=content["example"])
    assert reply.status_code == 200
    published.check(reply)


# The document


def test_every_route_is_described(server: RunningServer, published: PublishedSchema) -> None:
    app = server.http.config.app
    assert isinstance(app, FastAPI)
    described = {(method, path) for path, operations in published.document["paths"].items() for method in operations}
    routes = {
        (method.lower(), route.path_format)
        for route in app.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods
    }
    assert described >= routes
    assert ("post", "/v1/completions") in described


def test_each_operation_says_what_can_go_wrong(published: PublishedSchema) -> None:
    for path, operations in published.document["paths"].items():
        for method, operation in operations.items():
            statuses = set(operation["responses"])
            assert {"200", "400", "408", "431", "500"} <= statuses
            assert "422" not in statuses
            assert ("401" in statuses) is (path not in OPEN_PATHS)
            if method == "post" and path not in OPEN_PATHS:
                assert {"404", "413", "415", "429", "502", "503", "504"} <= statuses
                assert "example" in operation["requestBody"]["content"]["application/json"]
                assert operation["responses"]["200"]["content"]["application/json"]["schema"]


def test_references_resolve_and_the_schemas_are_schemas(published: PublishedSchema) -> None:
    schemas = published.document["components"]["schemas"]
    assert {ref.removeprefix("#/components/schemas/") for ref in refs_of(published.document)} <= set(schemas)
    assert not any("Validation" in name for name in schemas)
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)


def test_the_check_itself_can_fail(published: PublishedSchema) -> None:
    schema = {"$ref": "#/components/schemas/Version"}
    published.validate({"version": "1"}, schema)
    for wrong in ({}, {"version": 1}, {"version": "1", "extra": 1}):
        with pytest.raises(ValidationError):
            published.validate(wrong, schema)


@pytest.mark.parametrize("keys", [(), ("k",)])
def test_the_key_is_required_where_it_is(tmp_path_factory: pytest.TempPathFactory, keys: tuple[str, ...]) -> None:
    directory = write_model_directory(tmp_path_factory.mktemp("model"))
    with running_server(directory, ["tcp://127.0.0.1:1"], access=AccessConfig(api_key=keys)) as server:
        document = server.client.get("/openapi.json").json()
        assert document["components"]["securitySchemes"]["ApiKey"] == {"type": "http", "scheme": "bearer"}
        assert document["paths"]["/v1/models"]["get"]["security"] == [{"ApiKey": []}] + ([] if keys else [{}])
        assert "security" not in document["paths"]["/health"]["get"]
        reply = server.client.get("/ready")
        assert reply.status_code == 503
        published = PublishedSchema(server)
        published.check(reply)
        if keys:
            refused = server.client.get("/v1/models")
            assert refused.status_code == 401
            published.check(refused)


# The page


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        named = dict(attrs)
        self.links += [named[name] for name in ("href", "src") if name in named]
        self.ids |= {named["id"]} if "id" in named else set()

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_shows_all_and_loads_nothing(server: RunningServer, published: PublishedSchema) -> None:
    reply = server.client.get("/docs")
    assert reply.headers["content-type"].startswith("text/html")
    page = _Page(reply.text)
    assert page.tags.isdisjoint({"script", "link", "img", "iframe"})
    assert {link for link in page.links if not link.startswith("#")} == {"openapi.json"}
    assert {link.removeprefix("#") for link in page.links if link.startswith("#")} <= page.ids
    for path in published.document["paths"]:
        assert path in page.text
    assert set(published.document["components"]["schemas"]) <= page.ids
    assert "default-src 'none'" in reply.headers["content-security-policy"]


def test_text_of_the_document_is_no_html() -> None:
    from server.docs_page import render

    info = {"title": "<b>", "version": "1", "description": "<script>"}
    operation = {"summary": "<i>", "responses": {"200": {"description": "<u>"}}}
    text = render({"info": info, "paths": {"/<p>": {"get": operation}}})
    assert all(tag not in text for tag in ("<b>&", "<script>", "<i>", "<u>", "/<p>"))
    assert "&lt;script&gt;" in text
