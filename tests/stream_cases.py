"""What a node may say and a client may ask for, at random; and what the client must then read, by definition."""

import codecs
from dataclasses import dataclass
from functools import cache, cached_property
from random import Random
from typing import Any

from server.tokenizer import Tokenizer

SCRIPTS = (
    "The quick brown fox, naïve café",
    "Z̸̡a̷l͝g̴o̶ ñ ở ḗ",  # combining marks
    "مرحبا بالعالم، كيف حالك؟",
    "שלום עולם",
    "नमस्ते दुनिया क्षत्रिय",
    "สวัสดีชาวโลก กำลัง",
    "日本語のテキスト。 汉字 𠮷野家",  # one beyond the basic plane
    "한국어 각",  # the last as three jamo
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇫🇷🇩🇪 1️⃣#️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "Съешь же ещё этих булок",
    "\ufffd a real replacement character \ufffd",
    "line\r\nbreak\u2028\u0000\u200b\u00a0tab\t",
    "aaaaabaaaabab abcabcabd",
)
BROKEN = (
    b"\xed\xa0\x80",  # half of a surrogate pair
    b"\xed\xa0\xbd\xed\xb8\x80",  # both, as UTF-8 forbids
    b"\x80\x80",  # continuations of nothing
    b"\xc0\xaf",  # overlong
    b"\xf4\x90\x80\x80",  # beyond the last code point
    b"\xe4\xbd",  # cut off
    b"\xf0\x9f\x91",
    b"\xf0\x9f\xc3\xa9",
    b"\xff\xfe",
)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A whole answer."""

    text: str
    num_tokens: int
    finish_reason: str
    stop_reason: int | str | None


@dataclass(frozen=True, kw_only=True)
class StreamCase:
    """The ids that a node sends and how the client wants them shown."""

    tokenizer: Tokenizer
    ids: list[int]
    stops: list[str]
    include_stop: bool
    skip_special: bool
    min_tokens: int
    stop_token: int | None
    """Given if the last id ends the output by itself."""

    @property
    def body(self) -> dict[str, Any]:
        return {
            "stop": self.stops,
            "include_stop_str_in_output": self.include_stop,
            "skip_special_tokens": self.skip_special,
            "min_tokens": self.min_tokens,
            "stop_token_ids": [] if self.stop_token is None else [self.stop_token],
            "max_tokens": 100,
            "return_token_ids": True,
        }

    @cached_property
    def texts(self) -> list[str]:
        """Item k: the text of the first k tokens, less an unfinished character at its end."""
        hidden = self.stop_token is not None and not self.include_stop
        raws = [b"" if self._is_skipped(token_id) else self.tokenizer.token_bytes(token_id) for token_id in self.ids]
        if hidden:
            raws[-1] = b""
        return [text_of(self.tokenizer, b"".join(raws[:count])) for count in range(len(raws) + 1)]

    @cached_property
    def expected(self) -> Expected:
        """The first end of a stop string decides that comes with the last of `min_tokens` or later."""
        for count in range(max(1, self.min_tokens), len(self.ids) + 1):
            text = self.texts[count]
            for end in range(len(self.texts[count - 1]) + 1, len(text) + 1):
                if stop := max((stop for stop in self.stops if text[:end].endswith(stop)), key=len, default=""):
                    shown = text[: end if self.include_stop else end - len(stop)]
                    return Expected(text=shown, num_tokens=count, finish_reason="stop", stop_reason=stop)
        return Expected(
            text=self.texts[-1],
            num_tokens=len(self.ids),
            finish_reason="length" if self.stop_token is None else "stop",
            stop_reason=self.stop_token,
        )

    def may_be_held_back(self, text: str) -> bool:
        """Whether a stop string might go on after this."""
        return any(stop.startswith(text) and stop != text for stop in self.stops)

    def _is_skipped(self, token_id: int) -> bool:
        return self.skip_special and token_id in self.tokenizer.special_ids


def text_of(tokenizer: Tokenizer, raw: bytes) -> str:
    """As the two kinds of tokenizer define it: a byte-level one replaces broken sequences, SentencePiece each byte."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(raw)
    if b"ByteFallback" not in tokenizer.file.decoder.__getstate__():
        return text
    finished = raw.removesuffix(decoder.getstate()[0])
    text = ""
    while finished:
        length = next((n for n in range(1, 5) if is_text(finished[:n])), None)
        text += "\ufffd" if length is None else finished[:length].decode()
        finished = finished[length or 1 :]
    return text


def is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def make_case(rng: Random, tokenizer: Tokenizer) -> StreamCase:
    ids = [token_id for _ in range(rng.randint(1, 6)) for token_id in _make_ids(rng, tokenizer)][:90] or [0]
    common = {
        "tokenizer": tokenizer,
        "ids": ids,
        "include_stop": rng.random() < 0.4,
        "skip_special": rng.random() < 0.7,
        "min_tokens": rng.choice([0, 0, 1, rng.randint(0, len(ids))]),
        "stop_token": ids[-1] if rng.random() < 0.25 else None,
    }
    return StreamCase(**common, stops=_make_stops(rng, StreamCase(**common, stops=[]).texts[-1]))


def _make_ids(rng: Random, tokenizer: Tokenizer) -> list[int]:
    match rng.choice(["words", "words", "words", "bytes", "broken", "special", "any"]):
        case "words":
            return tokenizer.encode(_slice(rng, rng.choice(SCRIPTS), 24), add_special_tokens=False)
        case "bytes":
            return _as_bytes(tokenizer, _slice(rng, rng.choice(SCRIPTS), 8).encode())
        case "broken":
            return _as_bytes(tokenizer, rng.choice(BROKEN))
        case "special":
            return [rng.choice(sorted(tokenizer.special_ids))] * rng.randint(1, 3)
        case _:
            return rng.choices(range(tokenizer.vocab_size), k=rng.randint(1, 8))


def _as_bytes(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """Less the bytes that the vocabulary has no token for."""
    ids = _single_bytes(tokenizer)
    return [ids[byte] for byte in raw if byte in ids]


@cache
def _single_bytes(tokenizer: Tokenizer) -> dict[int, int]:
    raws = ((tokenizer.token_bytes(token_id), token_id) for token_id in range(tokenizer.vocab_size))
    return {raw[0]: token_id for raw, token_id in raws if len(raw) == 1}


def _make_stops(rng: Random, text: str) -> list[str]:
    """Parts of the text, parts of these, what only begins like them, and what does not occur."""
    if not text or rng.random() < 0.2:
        return []
    stops = []
    for _ in range(rng.randint(1, 3)):
        stop = _slice(rng, text[len(text) // 4 :], 7)
        stops += rng.choice([[stop], [stop, stop[: rng.randint(1, len(stop))]], [stop + "x"], [stop[1:] or stop, stop]])
    return stops + ([_slice(rng, rng.choice(SCRIPTS), 5)] if rng.random() < 0.3 else [])


def _slice(rng: Random, text: str, most: int) -> str:
    start = rng.randrange(len(text))
    return text[start : start + rng.randint(1, most)]
