"""Server-sent events, by hand: bytes in as they arrive, the data of whole events out."""

_SEPARATOR = b"\n\n"


class EventParser:
    """Fed the pieces of a body, which may be cut anywhere. Lines may end in LF or CR LF."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that `piece` completes. Comments, and events without data, give nothing."""
        rest = self._rest + piece
        if b"\r" in rest:
            # A CR at the very end may be half of a line's end: it stays until what follows it is here.
            held = b"\r" if rest.endswith(b"\r") else b""
            rest = rest[: len(rest) - len(held)].replace(b"\r\n", b"\n") + held
        if _SEPARATOR not in rest:
            self._rest = rest
            return []
        *events, self._rest = rest.split(_SEPARATOR)
        return [data for event in events if (data := _data_of(event)) is not None]

    @property
    def is_between_events(self) -> bool:
        """False: the body so far ends inside of an event."""
        return not self._rest.strip()


def _data_of(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
