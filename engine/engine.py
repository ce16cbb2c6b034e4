"""The engine: schedule, execute, update. Both kinds of node run it."""

from typing import Protocol

from engine.batch import Batch, BatchResult
from engine.grammar_pool import GrammarPool
from engine.outputs import RequestOutput
from engine.request import Request
from engine.scheduler import Scheduler


class Worker(Protocol):
    """Whoever runs the forward. Learns everything from the batch; remembers weights and KV only."""

    def execute(self, batch: Batch) -> BatchResult: ...

    def shutdown(self) -> None: ...


class Engine:
    """One scheduler, one worker, one thread.

    The loop around it: `step` at once while `has_work`; otherwise, while not `is_idle`, step whenever the connector
    may have something to report; when idle, block until a request comes.
    """

    def __init__(self, scheduler: Scheduler, worker: Worker, grammars: GrammarPool | None = None) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self._grammars = grammars

    def shutdown(self) -> None:
        """Nothing may be called afterwards."""
        self.worker.shutdown()
        if self._grammars is not None:
            self._grammars.close()

    def add_request(self, request: Request) -> None:
        """Raises `RequestError` if it could never be served."""
        self.scheduler.add_request(request)

    def abort_request(self, request_id: str) -> None:
        """Its final output comes from the next `step`. Unknown ids are ignored."""
        self.scheduler.abort_request(request_id)

    def abort_all(self) -> None:
        """Ends every live request; their final outputs come from the next `step`."""
        self.scheduler.abort_all()

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def is_idle(self) -> bool:
        return self.scheduler.is_idle()

    def step(self) -> list[RequestOutput]:
        """One step. Its batch may be empty: then only the connector gets to speak."""
        batch = self._with_connector_metadata(self.scheduler.schedule())
        result = self.worker.execute(batch)
        if self.scheduler.connector is not None and result.connector_output:
            self.scheduler.connector.update_connector_output(result.connector_output)
        outputs = self.scheduler.update(batch, result)
        if self.scheduler.is_idle():
            self.scheduler.check()
        return outputs

    def _with_connector_metadata(self, batch: Batch) -> Batch:
        if self.scheduler.connector is None:
            return batch
        return batch.with_connector_metadata(self.scheduler.connector.build_connector_meta(batch))
