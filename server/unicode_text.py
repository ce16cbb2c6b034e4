"""Text and JSON of request bodies that can be tokenized and sent back."""

from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, StrictStr
from pydantic_core import PydanticCustomError


def check_unicode(text: str) -> str:
    # JSON can spell half of a surrogate pair, which is no text: it can be neither tokenized nor sent back.
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise PydanticCustomError("string_unicode", "Input should be valid Unicode text")
    return text


def _check_object(value: dict[str, Any]) -> dict[str, Any]:
    try:
        orjson.dumps(value)
    except TypeError as error:
        # Half of a surrogate pair, an integer of more than 64 bits, or a nesting that nobody means.
        raise PydanticCustomError("json_object", "Input cannot be sent as JSON: {why}", {"why": str(error)}) from error
    return value


Text = Annotated[StrictStr, AfterValidator(check_unicode)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_check_object)]
