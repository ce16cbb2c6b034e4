"""`kv_transfer_params` between HTTP and the nodes: what one leg may ask for, and how it is read and shown.

prefill leg   do_remote_decode    one sequence, not streamed: only a response in one piece says where its KV is held
decode leg    do_remote_prefill   one sequence: the KV is held once and fetched once
"""

from typing import Any

from pydantic import ValidationError

from connector.kv_transfer_params import KVTransferParams
from engine.errors import RequestError
from server.protocol import GenerationBody, KVTransferBody

FIELD = "kv_transfer_params"


def leg_of(body: GenerationBody) -> KVTransferParams | None:
    """For the node; None unless the body is one leg of two."""
    return _typed(body.kv_transfer_params)


def leg_of_invalid(body: object) -> KVTransferParams | None:
    """The same for a body that was refused as a whole: its other fields are wrong, but this one may be right."""
    given = body.get(FIELD) if isinstance(body, dict) else None
    try:
        return _typed(KVTransferBody.model_validate(given)) if given is not None else None
    except ValidationError:
        return None


def check_leg(body: GenerationBody, num_prompts: int = 1) -> None:
    """Raises `RequestError` naming the field if the legs cannot work for this request."""
    params = body.kv_transfer_params or KVTransferBody()
    is_single = num_prompts * max(body.n or 1, getattr(body, "best_of", None) or 1) == 1
    if params.do_remote_decode and (body.stream or not is_single):
        _refuse("do_remote_decode", "stream to be false, n to be 1 and a single prompt")
    if params.do_remote_prefill and not is_single:
        _refuse("do_remote_prefill", "n to be 1 and a single prompt")


def shown(params: KVTransferParams) -> dict[str, Any]:
    """As the client sees it: what is not set is left out."""
    return {name: value for name in params.__struct_fields__ if (value := getattr(params, name)) is not None}


def _typed(params: KVTransferBody | None) -> KVTransferParams | None:
    if params is None or not params.is_leg:
        return None
    return KVTransferParams(**{name: getattr(params, name) for name in KVTransferParams.__struct_fields__})


def _refuse(name: str, needs: str) -> None:
    raise RequestError(f"{FIELD}.{name} needs {needs}", param=f"{FIELD}.{name}")
