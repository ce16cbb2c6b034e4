"""What the routes call: admission, prompts in, generations out. No HTTP here."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

from connector.kv_transfer_params import KVTransferParams
from engine.errors import ErrorKind, RequestError, ServingError
from engine.sampling_params import SamplingParams
from server.admission import Admission
from server.choice import Choice, OutputOptions
from server.config import ServerConfig
from server.fleet import Fleet, Flight, Work
from server.generation import Generation
from server.metrics import Metrics, SequenceBooks
from server.model_assets import ModelAssets
from server.node_client import OutputSink
from server.prompts import Prompt, PromptReader
from server.structured_output import GrammarReader
from server.trace import current_trace

MAX_SEQUENCES = 1024
"""Most sequences of one request: prompts times n."""


class UnknownModel(RequestError):
    """The request names a model that is not served."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The model `{name}` does not exist.", param="model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sequence to generate."""

    prompt: Prompt
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Everything one HTTP request asks of the nodes; choice i is job i."""

    request_id: str
    """The client's, or one made for it; need not be unique."""
    arrival: float
    """On the monotonic clock."""
    jobs: Sequence[Job]
    options: OutputOptions
    cache_salt: str = ""
    priority: int = 0
    kv_transfer_params: KVTransferParams | None = None
    """Only with a single job."""


class Service:
    """One model behind one fleet."""

    def __init__(self, config: ServerConfig, assets: ModelAssets) -> None:
        self.config = config
        self.assets = assets
        self.started_at = int(time.time())
        self.prompts = PromptReader(assets, trusts_templates=config.chat.trust_request_chat_template)
        self.grammars = GrammarReader(assets.directory)
        self.metrics = Metrics(config.model_names[0])
        self.fleet = Fleet(config, self.metrics, assets.config_digest)
        self.admission = Admission(config.limits.max_in_flight, self.fleet, self.metrics.admission_rejections)
        self._is_draining = False
        self._generations: set[Generation] = set()

    def model_name(self, requested: str | None) -> str:
        """The name to answer with. Raises `UnknownModel`."""
        if requested is None:
            return self.config.model_names[0]
        if requested not in self.config.model_names:
            raise UnknownModel(requested)
        return requested

    def admit(self, num_sequences: int = 1) -> int:
        """The longest prompt plus output served now. Raises `ServingError` if nothing, or not so many sequences, can
        be served. Called before prompts are tokenized."""
        reason = "the server is shutting down" if self._is_draining else self.fleet.cannot_serve_reason
        max_model_len = self.fleet.max_model_len
        if reason is not None or max_model_len is None:
            self.metrics.admission_rejections.inc()
            raise ServingError(reason or "no decode node is ready", kind=ErrorKind.NO_NODE_READY)
        self.admission.check(num_sequences)
        return max_model_len

    @property
    def not_ready_reason(self) -> str | None:
        return "shutting down" if self._is_draining else self.fleet.not_ready_reason

    def start(self, submission: Submission) -> Generation:
        """Sends all jobs off. The caller must use the generation as a context manager."""
        if len(submission.jobs) > MAX_SEQUENCES:
            raise RequestError(f"prompts times n must be at most {MAX_SEQUENCES}", param="n")
        self.admission.check(len(submission.jobs))
        generation = self._open(len(submission.jobs))
        # Clients choose request ids freely, and twice the same; what crosses to the nodes must be unique.
        unique = f"{submission.request_id}-{uuid4().hex[:12]}"
        try:
            for index in range(len(submission.jobs)):
                self._launch(generation, submission, index, f"{unique}-{index}")
        except BaseException:
            # Whatever it was, nothing of the request may stay behind.
            generation.close()
            raise
        generation.expire_in(self.config.limits.request_timeout)
        return generation

    @contextmanager
    def released_on_failure(self, leg: KVTransferParams | None) -> Iterator[None]:
        """Around everything between a body and its node: if that fails, nobody will come for the KV held elsewhere."""
        try:
            yield
        except BaseException:
            self.release(leg)
            raise

    def release(self, leg: KVTransferParams | None) -> None:
        """Gives back the KV that a request was to fetch; does nothing for one that was not."""
        if leg is not None and leg.do_remote_prefill:
            self.fleet.release(leg)

    async def drain(self) -> None:
        """Admits nothing more, lets running requests go on for a while, then ends them with an error."""
        self._is_draining = True
        deadline = time.monotonic() + self.config.shutdown_timeout
        while self._generations and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        error = ServingError("the server is shutting down", kind=ErrorKind.NO_NODE_READY)
        for generation in list(self._generations):
            generation.abort(error)

    def _open(self, num_sequences: int) -> Generation:
        generation = Generation(on_close=partial(self._close, num_sequences))
        self._generations.add(generation)
        self.admission.num_submitted += 1
        self.admission.num_sequences += num_sequences
        return generation

    def _close(self, num_sequences: int, generation: Generation) -> None:
        if generation in self._generations:
            self._generations.remove(generation)
            self.admission.num_submitted -= 1
            self.admission.num_sequences -= num_sequences

    def _launch(self, generation: Generation, submission: Submission, index: int, unique_id: str) -> None:
        job = submission.jobs[index]
        token_ids = job.prompt.token_ids
        work = Work(
            request_id=unique_id,
            token_ids=token_ids,
            sampling=job.sampling,
            cache_salt=submission.cache_salt,
            priority=submission.priority,
            trace=current_trace.get(),
            kv_transfer_params=submission.kv_transfer_params,
        )

        def launch(sink: OutputSink) -> Flight:
            return self.fleet.submit(work, sink)

        choice = Choice(index, self.assets.tokenizer, token_ids, submission.options)
        generation.add(choice, SequenceBooks(self.metrics, len(token_ids), submission.arrival), launch)
