"""What an output must look like, as it travels: a kind and a text. Torch-free, so that the server can build it."""

from dataclasses import dataclass
from typing import Literal

from engine.errors import PdserveError

GrammarKind = Literal["json_schema", "regex", "choice", "lark"]
MAX_GRAMMAR_CHARS = 1 << 16


class GrammarError(PdserveError):
    """The grammar cannot be compiled, or became too complex while it ran. The message is for the client."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """Raises `GrammarError` if the text is too long.

    kind         text
    json_schema  the schema, as JSON; a space after comma and colon may come or not, and no other whitespace, which a
                 model that may write it sometimes writes for ever
    regex        a regular expression that the whole output matches
    choice       a JSON list of strings, one of which the output is
    lark         Lark as llguidance reads it
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise GrammarError(f"at most {MAX_GRAMMAR_CHARS} characters, got {len(self.text)}")
