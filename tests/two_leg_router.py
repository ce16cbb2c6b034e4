"""A router that follows vLLM's two-leg protocol, scripted: what other people's routers do with two servers.

client -> router -> prefill server   the body for one token, not streamed, asking for the KV to be held
          router <- prefill server   `kv_transfer_params`: where it is held
          router -> decode server    the client's body with those params, unread
client <- router <- decode server    its bytes, unchanged
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from uuid import uuid4

import httpx

Body = Mapping[str, Any]

ASK_TO_HOLD: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
DROPPED = ("stream_options", "min_tokens", "min_completion_tokens")


@dataclass(frozen=True, slots=True)
class TwoLegs:
    """What both servers answered. `decode` is read to its end."""

    prefill: httpx.Response
    decode: httpx.Response


class TwoLegRouter:
    """Two base URLs in front of a prefill and a decode node. Use as a context manager.

    With `reuse_token_ids` a chat's prompt is tokenized by the first leg only.
    """

    def __init__(
        self, prefill_url: str, decode_url: str, *, reuse_token_ids: bool = False, timeout: float = 60
    ) -> None:
        self.prefill = httpx.Client(base_url=prefill_url, timeout=timeout)
        self.decode = httpx.Client(base_url=decode_url, timeout=timeout)
        self._reuse_token_ids = reuse_token_ids

    def __enter__(self) -> "TwoLegRouter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.prefill.close()
        self.decode.close()

    def complete(self, **body: Any) -> TwoLegs:
        return self.send("/v1/completions", body)

    def chat(self, **body: Any) -> TwoLegs:
        return self.send("/v1/chat/completions", body)

    def send(self, path: str, body: Body, *, request_id: str | None = None) -> TwoLegs:
        """Both legs. Raises `httpx.HTTPStatusError` if the first fails; the second's status is the client's."""
        request_id = request_id or uuid4().hex
        first = self.prefill_leg(path, body, request_id=request_id)
        with self.decode_leg(path, body, first, request_id=request_id) as second:
            second.read()
        return TwoLegs(first, second)

    def prefill_leg(self, path: str, body: Body, *, request_id: str) -> httpx.Response:
        leg = prefill_body(body)
        if self._reuse_token_ids:
            leg["return_token_ids"] = True
        return self.prefill.post(path, json=leg, headers=_headers(request_id)).raise_for_status()

    @contextmanager
    def decode_leg(self, path: str, body: Body, first: httpx.Response, *, request_id: str) -> Iterator[httpx.Response]:
        """The response as it streams in; leaving early is what a client that goes away does."""
        leg = dict(body)
        answer = first.json()
        if params := answer.get("kv_transfer_params"):
            leg["kv_transfer_params"] = params
            if self._reuse_token_ids and "prompt_token_ids" in answer:
                leg["kv_transfer_params"] = params | {"prompt_token_ids": answer["prompt_token_ids"]}
        with self.decode.stream("POST", path, json=leg, headers=_headers(request_id)) as response:
            yield response


def prefill_body(body: Body) -> dict[str, Any]:
    """The first leg of a client's body."""
    leg = {name: value for name, value in body.items() if name not in DROPPED}
    leg |= {"stream": False, "max_tokens": 1, "kv_transfer_params": dict(ASK_TO_HOLD)}
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    return leg


def _headers(request_id: str) -> dict[str, str]:
    return {"X-Request-Id": request_id}
