"""Message headers: msgpack by msgspec, typed, bounded; never pickle. Payloads travel beside them as raw frames."""

from typing import Any, Generic, TypeVar

import msgspec

from engine.errors import MalformedMessage, PdserveError

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 64 << 20
"""A `Generate` of a million-token prompt takes 5 MB; anything near this limit is not one of our messages."""

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


class Decoder(Generic[M]):
    """Decodes one link's closed set of messages. Raises `MalformedMessage` on anything else."""

    def __init__(self, messages: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)

    def decode(self, header: bytes | memoryview) -> M:
        if len(header) > MAX_HEADER_BYTES:
            raise MalformedMessage(f"header of {len(header)} bytes is over the limit of {MAX_HEADER_BYTES}")
        try:
            return self._decoder.decode(header)
        except (msgspec.MsgspecError, PdserveError, RecursionError, ValueError) as error:
            raise MalformedMessage(str(error)) from error
