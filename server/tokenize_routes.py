"""POST /tokenize and /detokenize"""

import asyncio
from typing import Any

from fastapi import APIRouter

from engine.errors import RequestError
from server.openapi import answers
from server.prompts import Prompt
from server.protocol import DetokenizeBody, TokenizeBody, refuse_unsupported
from server.response_schema import Detokenized, Tokenized
from server.service import Service


def tokenize_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", **answers(Tokenized, example={"prompt": "Hello"}))
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        service.model_name(body.model)
        refuse_unsupported(body)
        max_model_len = service.admit()
        ids = list((await _prompt(body, service, max_model_len)).token_ids)
        file = service.assets.tokenizer.file
        strings = [file.id_to_token(token_id) for token_id in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": strings}

    @router.post("/detokenize", **answers(Detokenized, example={"tokens": [1, 2, 3]}))
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        service.model_name(body.model)
        if body.tokens:
            service.prompts.read_token_ids(body.tokens, "tokens", len(body.tokens))
        decode = service.assets.tokenizer.decode
        return {"prompt": await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)}

    return router


async def _prompt(body: TokenizeBody, service: Service, max_model_len: int) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        return await service.prompts.read_chat(body.messages, body, max_model_len)
    add_special = body.add_special_tokens is not False
    return await service.prompts.read_text(body.prompt or "", max_model_len, add_special_tokens=add_special)
