"""The flags of `pdserve loadtest`, grouped by who reads them."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from loadtest.errors import SettingError
from loadtest.goodput import Objectives

WorkloadName = Literal["chat", "long", "interference", "multi-turn", "trace", "sharegpt"]
Arrivals = Literal["poisson", "constant", "gamma", "trace"]
Endpoint = Literal["chat", "completions"]

READS_FILE = ("trace", "sharegpt")
DEFAULT_NUM_REQUESTS = 64
DEFAULT_CONCURRENCY = 4
DEFAULT_LONG_RATE = 0.5


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Whom to ask, and how."""

    base_url: str = "http://127.0.0.1:8000"
    """Root of the server, without /v1."""
    against: str | None = None
    """Root of a second server: both are measured in turns, and compared."""
    model: str | None = None
    """Model to ask for. Default: the first of /v1/models."""
    against_model: str | None = None
    """The same for the second server."""
    api_key_file: Path | None = None
    """File with the API key. Default: the environment variable OPENAI_API_KEY, if set."""
    against_api_key_file: Path | None = None
    """The same for the second server, which never gets the first one's key."""
    endpoint: Endpoint = "chat"
    """/v1/chat/completions or /v1/completions."""
    exact_output: bool = True
    """Have answers exactly as long as planned by ignore_eos and min_tokens, which OpenAI itself does not know."""
    timings: bool = False
    """Ask for the server's own timings of each request, where it offers them."""
    body: str = "{}"
    """JSON object of further fields for each request."""
    timeout: float = 300.0
    """Seconds that one request may take."""

    def __post_init__(self) -> None:
        for flag, url in (("--base-url", self.base_url), ("--against", self.against)):
            _require(url is None or url.startswith(("http://", "https://")), flag, "must begin with http(s)://", url)
        _require(self.timeout > 0, "--timeout", "must be > 0", self.timeout)
        assert isinstance(self.fields, dict)

    @cached_property
    def fields(self) -> dict[str, Any]:
        try:
            value = json.loads(self.body)
        except ValueError as error:
            raise SettingError(f"--body is not JSON: {error}") from error
        _require(isinstance(value, dict), "--body", "must be a JSON object", self.body)
        return dict(value)


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """How requests arrive. Closed loop (--concurrency) or open loop (--rate), never both."""

    concurrency: int | None = None
    """Closed loop: so many at a time, one after the other. For interference: the steady decodes. Default 4."""
    rate: float | None = None
    """Open loop: requests per second, whatever the server does. For interference: the long prompts. Default 0.5."""
    arrivals: Arrivals | None = None
    """Open loop: how they are spread. Default: poisson; constant for interference; trace for a trace without --rate."""
    burstiness: float = 1.0
    """Shape of gamma arrivals: 1 is poisson, less comes in bursts, more is steadier."""
    speed: float = 1.0
    """Trace arrivals: how much faster than the timestamps say."""
    max_concurrency: int | None = None
    """Open loop: what arrives over this waits in the client. Its waiting counts as latency."""
    num_requests: int | None = None
    """Requests in a round; conversations, where they have several turns. Default 64, the whole file of a trace."""
    duration: float | None = None
    """Seconds in which requests start in a round."""
    drain: float = 30.0
    """Seconds to wait for what is under way when --duration is over. What is left then is cut off and counted."""
    warmup: int = 2
    """Requests before measuring, one after the other. If one fails the test does not begin."""
    calibrate: bool = True
    """Learn from two short requests how many words make a token, so that prompts have the length asked for."""
    rounds: int | None = None
    """Rounds of each server. Default: 1; 5 with --against, which alternates them."""
    seed: int | None = None
    """Of prompts and arrivals. Default: the clock, so that no prefix cache knows the prompts; it is printed."""

    def __post_init__(self) -> None:
        for flag, count, least in (
            ("--concurrency", self.concurrency, 1),
            ("--max-concurrency", self.max_concurrency, 1),
            ("--num-requests", self.num_requests, 1),
            ("--rounds", self.rounds, 1),
            ("--warmup", self.warmup, 0),
        ):
            _require(count is None or count >= least, flag, f"must be at least {least}", count)
        for flag, value in (
            ("--rate", self.rate),
            ("--burstiness", self.burstiness),
            ("--speed", self.speed),
            ("--duration", self.duration),
        ):
            _require(value is None or value > 0, flag, "must be > 0", value)
        _require(self.drain >= 0, "--drain", "must be >= 0", self.drain)
        _require(self.burstiness == 1.0 or self.arrivals == "gamma", "--burstiness", "needs --arrivals gamma", "none")


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """What is asked."""

    workload: WorkloadName = "chat"
    """chat: short. long: long prompts. interference: steady decodes, then long prompts among them. multi-turn:
    conversations that share system prompts. trace: Mooncake's JSONL. sharegpt: conversations from a JSON file."""
    input_tokens: int | None = None
    """Of a prompt. Default: chat 128, long 2000, interference 128, multi-turn 64 a turn."""
    output_tokens: int | None = None
    """Of an answer. Default: chat 128, long 32, interference 512, multi-turn 64."""
    length_spread: float = 0.0
    """Lengths vary by this part, evenly, to both sides."""
    long_tokens: int = 2000
    """interference: length of the long prompts."""
    long_output_tokens: int = 1
    """interference: length of their answers."""
    lead: float = 5.0
    """interference: seconds in which the decodes run alone."""
    turns: int = 4
    """multi-turn: questions in a conversation; sharegpt: at most so many."""
    think_time: float = 0.0
    """multi-turn, sharegpt: seconds from an answer to the next question."""
    system_tokens: int = 256
    """multi-turn: length of the system prompts."""
    num_prefixes: int = 2
    """multi-turn: number of different system prompts."""
    file: Path | None = None
    """trace, sharegpt: the file."""
    trace_block_tokens: int = 512
    """trace: tokens for which one hash id stands."""
    trace_scale: float = 1.0
    """trace: lengths are multiplied by this, for a model with a short context."""
    max_input_tokens: int | None = None
    """trace, sharegpt: longer prompts are left out, and counted."""

    def __post_init__(self) -> None:
        for flag, count in (
            ("--input-tokens", self.input_tokens),
            ("--output-tokens", self.output_tokens),
            ("--long-tokens", self.long_tokens),
            ("--long-output-tokens", self.long_output_tokens),
            ("--turns", self.turns),
            ("--num-prefixes", self.num_prefixes),
            ("--trace-block-tokens", self.trace_block_tokens),
            ("--max-input-tokens", self.max_input_tokens),
        ):
            _require(count is None or count >= 1, flag, "must be at least 1", count)
        _require(0 <= self.length_spread < 1, "--length-spread", "must be in [0, 1)", self.length_spread)
        _require(self.trace_scale > 0, "--trace-scale", "must be > 0", self.trace_scale)
        for flag, seconds in (("--lead", self.lead), ("--think-time", self.think_time)):
            _require(seconds >= 0, flag, "must be >= 0", seconds)
        _require(self.system_tokens >= 0, "--system-tokens", "must be >= 0", self.system_tokens)
        _require(
            (self.workload in READS_FILE) == (self.file is not None), "--file", "is for trace, sharegpt", self.file
        )


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What is made of it."""

    goodput: tuple[str, ...] = ()
    """Objectives in milliseconds, as `ttft:200 tpot:50 e2el:5000`: goodput counts the requests that meet all."""
    json: Path | None = None
    """Write summary and requests to this file, to be compared later."""
    html: Path | None = None
    """Write a report with charts to this file."""
    label: str = ""
    """Name of the run in tables and reports. Default: the URL."""
    against_label: str = ""
    """The same for the second server."""
    progress: bool = True
    """Show the progress, if there is a terminal."""
    max_cpu_share: float = 0.8
    """A run in which the client used more of a core than this is marked as not clean."""
    max_lag_ms: float = 25.0
    """A run in which requests left (p99) later than planned by more than this is marked as not clean."""

    def __post_init__(self) -> None:
        Objectives.parse(self.goodput)
        _require(0 < self.max_cpu_share <= 1, "--max-cpu-share", "must be in (0, 1]", self.max_cpu_share)
        _require(self.max_lag_ms > 0, "--max-lag-ms", "must be > 0", self.max_lag_ms)
        for flag, path in (("--json", self.json), ("--html", self.html)):
            _require(path is None or path.absolute().parent.is_dir(), flag, "must be in a directory that exists", path)


@dataclass(frozen=True, kw_only=True)
class LoadTestConfig:
    """Load-tests OpenAI-compatible servers. `pdserve loadtest compare A.json B.json` compares two saved runs."""

    target: TargetConfig = field(default_factory=TargetConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        load, name = self.load, self.workload.workload
        if name != "interference":
            _require(not (load.concurrency and load.rate), "--rate", "excludes --concurrency", load.rate)
            open_flags = ("--arrivals", load.arrivals), ("--max-concurrency", load.max_concurrency)
            for flag, value in open_flags:
                _require(value is None or self.is_open_loop, flag, "is for an open loop: --rate", value)
        by_trace = load.arrivals == "trace"
        _require(not by_trace or name == "trace", "--arrivals", "trace needs --workload trace", load.arrivals)
        _require(not (by_trace and load.rate), "--rate", "excludes --arrivals trace", load.rate)

    @property
    def is_open_loop(self) -> bool:
        """Of the measured requests; the decodes of interference are a closed loop, its long prompts an open one."""
        by_trace = self.workload.workload == "trace" and self.load.concurrency is None
        return self.load.rate is not None or by_trace

    @property
    def num_rounds(self) -> int:
        return self.load.rounds or (5 if self.target.against else 1)


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Compares two saved runs: ratios, second to first, with 95 % intervals."""

    first: Annotated[Path, tyro.conf.Positional]
    """File that --json wrote: what is compared against."""
    second: Annotated[Path, tyro.conf.Positional]
    """Another one."""
    html: Path | None = None
    """Write a report with the charts of both to this file."""


def _require(holds: bool, flag: str, rule: str, value: object) -> None:
    if not holds:
        raise SettingError(f"{flag} {rule}, got {value}")
