"""What two processes must agree on before any KV or token crosses between them."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=65536)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]

KV_LAYOUT = "block,kv,slot,head,dim"
"""Order of a layer's KV tensor: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`."""


class ModelIdentity(Struct, frozen=True, kw_only=True):
    """Equal on all processes that serve one model together."""

    config_digest: Name
    weights_digest: Name
    dtype: Name
    num_layers: Count
    num_kv_heads: Count
    head_dim: Count
    block_size: Count
    layout: Name = KV_LAYOUT

    def mismatch(self, other: "ModelIdentity") -> str | None:
        """Why `other` cannot work with us, or None. In words: nobody knows a model by its digest."""
        differing = [field for field in self.__struct_fields__ if getattr(self, field) != getattr(other, field)]
        return "; ".join(_DIGESTED.get(field) or self._difference(other, field) for field in differing) or None

    def _difference(self, other: "ModelIdentity", field: str) -> str:
        return f"{field} is {getattr(self, field)} here and {getattr(other, field)} there"


_DIGESTED = {
    "config_digest": "the config differs",
    "weights_digest": "the weights differ",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """Who we are on the peer link."""

    name: str
    epoch: str
    model: ModelIdentity
    pid: int
