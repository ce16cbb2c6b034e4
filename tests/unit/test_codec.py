import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.codec import MAX_HEADER_BYTES, encode
from connector.peer_messages import Prefill, Unit, decode_from_decode_node, decode_from_prefill_node
from connector.server_messages import (
    Cancel,
    Generate,
    TokenOutput,
    Tokens,
    decode_from_node,
    decode_from_server,
)
from engine.errors import ErrorKind, MalformedMessage
from engine.request import SampledToken
from engine.sampling_params import SamplingParams

GENERATE = Generate(
    request_id="r",
    prompt_token_ids=[1, 2, 3],
    sampling=SamplingParams(max_tokens=3, logit_bias={5: 1.5}, stop_token_ids=(3,), seed=2**63 - 1, logprobs=2),
    cache_salt="salt",
    prefill_nodes=["p0"],
)
TOKENS = Tokens(
    outputs=[
        TokenOutput(
            request_id="r",
            tokens=[SampledToken(7, -0.5, ((7, -0.5), (8, -1.25)))],
            finish_reason="error",
            error_kind=ErrorKind.PEER_UNREACHABLE,
            error="gone",
        )
    ]
)


def test_messages_come_out_as_they_went_in():
    assert decode_from_server.decode(encode(GENERATE)) == GENERATE
    assert decode_from_node.decode(encode(TOKENS)) == TOKENS


def test_a_message_of_another_link_is_malformed():
    with pytest.raises(MalformedMessage):
        decode_from_node.decode(encode(GENERATE))
    with pytest.raises(MalformedMessage):
        decode_from_server.decode(
            encode(Unit(transfer_id="t", epoch="e", layer=0, start=0, end=1, num_bytes=1, saved_at=0))
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": ""},
        {"request_id": "x" * 257},
        {"request_id": 5},
        {"prompt_token_ids": []},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": [2**31]},
        {"prompt_token_ids": ["1"]},
        {"sampling": {"max_tokens": 0}},
        {"sampling": {"temperature": float("nan")}},
        {"sampling": {"seed": -1}},
        {"type": "Nonsense"},
    ],
)
def test_fields_outside_their_bounds_are_malformed(changes: dict[str, object]):
    fields = msgspec.to_builtins(GENERATE) | changes
    with pytest.raises(MalformedMessage):
        decode_from_server.decode(msgspec.msgpack.encode(fields))


@given(st.binary(max_size=200))
def test_garbage_is_malformed_and_nothing_worse(data: bytes):
    for decoder in (decode_from_server, decode_from_node, decode_from_decode_node, decode_from_prefill_node):
        with pytest.raises(MalformedMessage):
            decoder.decode(data)


@given(st.integers(0, 400), st.binary(max_size=3))
def test_a_truncated_or_damaged_message_never_does_worse_than_malformed(position: int, patch: bytes):
    grant = Prefill(
        transfer_id="t",
        prompt_token_ids=[1, 2],
        wants_first_token=True,
        sampling=SamplingParams(),
        start=0,
        end=2,
        block_ids=[1],
    )
    data = encode(grant)
    damaged = data[: position % len(data)] + patch
    with contextlib.suppress(MalformedMessage):
        assert isinstance(decode_from_decode_node.decode(damaged), Prefill)


def test_a_huge_header_is_refused_before_it_is_parsed():
    with pytest.raises(MalformedMessage, match="over the limit"):
        decode_from_server.decode(memoryview(bytes(MAX_HEADER_BYTES + 1)))


def test_deep_nesting_is_malformed():
    with pytest.raises(MalformedMessage):
        decode_from_server.decode(b"\x91" * 100_000 + b"\xc0")


def test_ids_in_cancel_are_bounded_text():
    assert decode_from_server.decode(encode(Cancel(request_ids=["a", "b"]))) == Cancel(request_ids=["a", "b"])
