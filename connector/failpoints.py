"""Fail-points: named places where a test makes a node or the server stand still, stumble or lose a message.

Nothing is armed unless `PDSERVE_FAILPOINTS`, or POST /debug/failpoints of a node that runs with --debug-state, says so:

    name=action[:arg][*count];...      decode.on_unit=drop*2;prefill.before_send.layer1=pause:20

  pause[:seconds]   until released, at most that long (30)      raise         the thread that gets there fails
  delay:seconds     go on after that time                       exit[:status] the process ends at once (1)
  drop              the message is lost; where there is one

`*count` limits how often it acts; the hits beyond it are still counted. A place in the code is one line,

    if failpoints.armed and failpoints.hit("decode.on_unit"):     # True: drop
        return

so that with nothing armed it costs the look at an empty dict.
"""

import os
import re
import threading
from dataclasses import dataclass, field

from engine.errors import ConfigError, PdserveError

ENVIRONMENT = "PDSERVE_FAILPOINTS"
PAUSE_SECONDS = 30.0

POINTS: dict[str, bool] = {
    "server.before_generate": True,
    "server.on_tokens": False,
    "decode.after_alloc": False,
    "decode.before_grant": True,
    "decode.before_cancel": True,
    "decode.before_ack": True,
    "decode.on_unit": True,
    "decode.on_first_token": True,
    "decode.on_done": True,
    "decode.on_closed": True,
    "prefill.on_grant": True,
    "prefill.on_cancel": True,
    "prefill.before_send": True,
    "prefill.after_send": False,
    "prefill.before_prompt_piece": True,
    "prefill.before_first_token": True,
    "prefill.before_done": True,
    "prefill.before_closed": True,
}
"""Whether there is a message to drop. Those of `prefill.*_send` are per layer: `prefill.before_send.layer2`."""

_SPEC = re.compile(
    r"(?P<name>[a-z_.]+?)(?P<layer>\.layer\d+)?=(?P<action>[a-z]+)(:(?P<arg>[0-9.]+))?(\*(?P<count>[0-9]+))?"
)
_ACTIONS = ("pause", "raise", "exit", "drop", "delay")


class FailPointRaised(PdserveError):
    """What `raise` raises."""


@dataclass(slots=True, eq=False)
class FailPoint:
    """One armed place."""

    name: str
    action: str
    arg: float | None = None
    count: int | None = None
    """How many hits act; None for all."""
    num_hits: int = 0
    entered: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """Lets go whoever is paused here, now and later."""
        self.released.set()

    def act(self) -> bool:
        """True if the message at this place is to be dropped."""
        self.num_hits += 1
        self.entered.set()
        if self.count is not None and self.num_hits > self.count:
            return False
        match self.action:
            case "pause":
                self.released.wait(PAUSE_SECONDS if self.arg is None else self.arg)
            case "delay":
                threading.Event().wait(self.arg)
            case "raise":
                raise FailPointRaised(f"fail-point {self.name}")
            case "exit":
                os._exit(1 if self.arg is None else int(self.arg))
        return self.action == "drop"


armed: dict[str, FailPoint] = {}
"""By name. Replaced entry by entry; read without a lock."""


def hit(name: str) -> bool:
    """Somebody got to the place `name`. True: drop the message."""
    point = armed.get(name)
    return point is not None and point.act()


def arm(spec: str) -> list[FailPoint]:
    """Arms what `spec` says, beside what is armed. Raises `ConfigError`, and arms nothing, where it is no sense."""
    points = [_parse(part.strip()) for part in spec.split(";") if part.strip()]
    for point in points:
        disarm(point.name)
        armed[point.name] = point
    return points


def arm_from_environment() -> None:
    """Arms what `PDSERVE_FAILPOINTS` says. Raises `ConfigError` naming it."""
    try:
        arm(os.environ.get(ENVIRONMENT, ""))
    except ConfigError as error:
        raise ConfigError(f"{ENVIRONMENT}: {error}") from error


def disarm(name: str) -> None:
    """Forgets the place and lets go whoever is paused there. Unknown names are ignored."""
    point = armed.pop(name, None)
    if point is not None:
        point.release()


def disarm_all() -> None:
    for name in list(armed):
        disarm(name)


def describe() -> list[dict[str, object]]:
    """What is armed, and how often each place was reached."""
    return [
        {"name": p.name, "action": p.action, "arg": p.arg, "count": p.count, "num_hits": p.num_hits}
        for p in list(armed.values())
    ]


def _parse(spec: str) -> FailPoint:
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ConfigError(f"{spec!r} is not of the form name=action[:arg][*count]")
    base, action = match["name"], match["action"]
    if base not in POINTS or (match["layer"] is not None) != base.endswith("_send"):
        raise ConfigError(f"there is no fail-point {base}{match['layer'] or ''}; there are {', '.join(_names())}")
    if action not in _ACTIONS:
        raise ConfigError(f"there is no action {action}; there are {', '.join(_ACTIONS)}")
    if action == "drop" and not POINTS[base]:
        raise ConfigError(f"at {base} there is nothing to drop")
    if action == "delay" and match["arg"] is None:
        raise ConfigError(f"{spec!r}: delay needs its seconds")
    return FailPoint(
        name=base + (match["layer"] or ""),
        action=action,
        arg=None if match["arg"] is None else _seconds(spec, match["arg"]),
        count=None if match["count"] is None else int(match["count"]),
    )


def _seconds(spec: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{spec!r}: {text} is not a number") from None


def _names() -> list[str]:
    return [f"{name}.layerN" if name.endswith("_send") else name for name in POINTS]
