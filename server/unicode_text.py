"""Text and JSON of request bodies that can be tokenized and sent back."""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, StrictStr
from pydantic_core import PydanticCustomError


def check_unicode(text: str) -> str:
    # JSON can spell half of a surrogate pair, which is no text: it can be neither tokenized nor sent back.
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise PydanticCustomError("string_unicode", "Input should be valid Unicode text")
    return text


def _check_object(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("string_unicode", "Input should be valid Unicode text") from error
    except RecursionError as error:
        raise PydanticCustomError("too_deep", "Input should not be nested so deeply") from error
    return value


Text = Annotated[StrictStr, AfterValidator(check_unicode)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_check_object)]
