"""The engine's side of the connector contract: two small interfaces, for the two ends of one step.

The scheduler and the worker call these; `connector/` implements them. They stand here because the engine imports
nothing of ours and yet must know whom it calls. Method names are those of the field.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.batch import Batch, ConnectorOutput
from engine.request import Request

if TYPE_CHECKING:
    import torch


class SchedulerConnector(ABC):
    """Bookkeeping beside the scheduler. No tensors, no sockets, no threads."""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the local hit can be had from elsewhere, and whether asynchronously.

        `(None, False)`: not known yet, ask again next step. `(0, False)`: none. `(n, True)`: allocate now, schedule
        nothing, wait for the load. `(n, False)`: schedule in this step; the layer barrier holds the forward.
        Free of side effects; may be called many times.
        """

    @abstractmethod
    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Blocks were allocated for `request`; `num_external_tokens` of them are to be filled by a load (may be 0)."""

    @abstractmethod
    def ships_kv(self, request: Request) -> bool:
        """Whether a transfer will read the blocks of `request` while it runs. Asked once, when they are allocated, with
        `request.num_external_tokens` set. If so they are pinned, and the request is not preempted, until it is reported
        as sent or failed, or `request_finished` says that it is not held.
        """

    @abstractmethod
    def build_connector_meta(self, batch: Batch) -> object:
        """What the worker side must know for this step. Called once per step; consumes what is pending."""

    @abstractmethod
    def update_connector_output(self, output: ConnectorOutput) -> None:
        """The worker side's report of the last step."""

    @abstractmethod
    def request_finished(self, request: Request, block_ids: Sequence[int]) -> tuple[bool, dict[str, object] | None]:
        """Called once for every way a request ends. `(True, ...)`: its blocks stay pinned until reported as sent,
        received or failed."""

    @abstractmethod
    def has_open_transfers(self) -> bool:
        """Whether any transfer is open: the engine must keep stepping."""

    @abstractmethod
    def has_pending_metadata(self) -> bool:
        """Whether the worker side must be told something, so that a step is due even with nothing to schedule."""

    def take_events(self) -> list[object]:
        """KV events since the last call."""
        return []


class LayerHooks(ABC):
    """The two calls around each layer's attention. The model does not know who answers."""

    @abstractmethod
    def wait_for_layer_load(self, layer: int) -> None:
        """Returns when every block of `layer` that this step reads is filled. Deadline inside."""

    @abstractmethod
    def save_kv_layer(self, layer: int) -> None:
        """This step's KV of `layer` has been written to its blocks."""


class WorkerConnector(LayerHooks):
    """Data movement beside the worker. All calls come from the thread that steps the engine."""

    @abstractmethod
    def register_kv_caches(self, kv_caches: Sequence["torch.Tensor"]) -> None:
        """One tensor `[num_blocks, 2, block_size, num_kv_heads, head_dim]` per layer. Sockets, pinned memory and
        threads are made here."""

    @abstractmethod
    def bind_connector_metadata(self, metadata: object) -> None:
        """This step's metadata, before `start_load_kv`."""

    @abstractmethod
    def clear_connector_metadata(self) -> None:
        """The step is over, also when the forward raised."""

    @abstractmethod
    def start_load_kv(self) -> None:
        """Begins this step's loads and returns at once."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Returns when the step's saves no longer need the step's own buffers."""

    @abstractmethod
    def get_finished(self, finished_ids: frozenset[str]) -> ConnectorOutput:
        """Transfers that are over since the last call; each id once."""

    @abstractmethod
    def shutdown(self) -> None:
        """Joins threads and closes sockets within a deadline. May be called twice."""
