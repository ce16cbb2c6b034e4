"""The worker's step: what is sampled, the order of the connector's calls, and what happens when the forward fails."""

from collections.abc import Callable, Sequence

import pytest
import torch

from engine.batch import Batch, BatchResult, ConnectorOutput, LoadResult, ScheduledRequest
from engine.decoder import Decoder
from engine.kv_cache import KVCache, KVLayout
from engine.kv_connector import WorkerConnector
from engine.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.worker import Worker
from tests.unit.conftest import TinyModel

MakeModel = Callable[[str], TinyModel]
GREEDY = SamplingParams(temperature=0.0, logprobs=1)
BLOCK_SIZE = 8
OUTPUT = ConnectorOutput(sent=frozenset({"gone"}), received={"here": LoadResult()})


class RecordingConnector(WorkerConnector):
    """Notes every call; `failing` raises from the call of that name."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[object] = []
        self.kv_caches: Sequence[torch.Tensor] = ()
        self._failing = failing

    def _note(self, call: str, *argument: object) -> None:
        self.calls.append((call, *argument) if argument else call)
        if call == self._failing:
            raise TimeoutError(call)

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor]) -> None:
        self.kv_caches = kv_caches

    def bind_connector_metadata(self, metadata: object) -> None:
        self._note("bind", metadata)

    def clear_connector_metadata(self) -> None:
        self._note("clear")

    def start_load_kv(self) -> None:
        self._note("start_load_kv")

    def wait_for_layer_load(self, layer: int) -> None:
        self._note("wait", layer)

    def save_kv_layer(self, layer: int) -> None:
        self._note("save", layer)

    def wait_for_save(self) -> None:
        self._note("wait_for_save")

    def get_finished(self, finished_ids: frozenset[str]) -> ConnectorOutput:
        self._note("get_finished")
        return OUTPUT

    def shutdown(self) -> None:
        self._note("shutdown")


def make_worker(model: TinyModel, connector: WorkerConnector | None = None, num_blocks: int = 64) -> Worker:
    layout = KVLayout.of_model(model.config, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32)
    return Worker(model.decoder, KVCache.allocate(layout), Sampler(model.config.vocab_size), connector)


def prompt_share(
    name: str, length: int, *, first_block: int, sampling: SamplingParams | None = GREEDY
) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=name,
        token_ids=[(7 * index + length) % 296 for index in range(length)],
        num_computed_tokens=0,
        block_ids=range(first_block, first_block + -(-length // BLOCK_SIZE)),
        sampling=sampling,
    )


class TestExecute:
    def test_samples_what_transformers_would(self, tiny_model: MakeModel) -> None:
        model = tiny_model("llama")
        requests = [prompt_share("a", 9, first_block=3), prompt_share("b", 20, first_block=10)]

        result = make_worker(model).execute(Batch(step=1, requests=requests))

        assert result.sampled.keys() == {"a", "b"}
        for request in requests:
            with torch.inference_mode():
                logits = model.oracle(torch.tensor([list(request.token_ids)])).logits[0, -1]
            token = result.sampled[request.request_id]
            assert token.token_id == int(logits.argmax())
            assert token.logprob == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-4)

    def test_samples_only_where_asked(self, tiny_model: MakeModel) -> None:
        worker = make_worker(tiny_model("llama"))
        unfinished = prompt_share("a", 9, first_block=3, sampling=None)
        result = worker.execute(Batch(step=1, requests=[unfinished, prompt_share("b", 20, first_block=10)]))
        assert result.sampled.keys() == {"b"}
        assert worker.execute(Batch(step=2, requests=[unfinished])) == BatchResult()

    def test_no_logits_for_rows_that_are_not_sampled(
        self, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shapes = []
        head = Decoder.head

        def noting_head(decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
            logits = head(decoder, hidden)
            shapes.append(logits.shape)
            return logits

        monkeypatch.setattr(Decoder, "head", noting_head)
        requests = [
            prompt_share("a", 20, first_block=3, sampling=None),
            prompt_share("b", 9, first_block=10),
            prompt_share("c", 1, first_block=20),
        ]
        make_worker(tiny_model("llama")).execute(Batch(step=1, requests=requests))
        assert shapes == [(2, 300)]

    def test_bad_numbers_of_one_request_cost_no_other_its_token(self, tiny_model: MakeModel) -> None:
        connector = RecordingConnector()
        worker = make_worker(tiny_model("llama"), connector)
        good = prompt_share("good", 9, first_block=3)
        alone = worker.execute(Batch(step=1, requests=[good])).sampled["good"].token_id
        connector.kv_caches[1][20].fill_(torch.nan)
        bad = prompt_share("bad", 1, first_block=20)._replace(num_computed_tokens=4)
        result = worker.execute(Batch(step=2, requests=[bad, good]))
        assert result.sampled["good"].token_id == alone
        assert result.sampled.keys() == {"good"}
        assert result.unsampled.keys() == {"bad"}
        assert worker.execute(Batch(step=3, requests=[bad])).unsampled.keys() == {"bad"}

    def test_a_step_without_requests(self, tiny_model: MakeModel) -> None:
        assert make_worker(tiny_model("llama")).execute(Batch(step=1)) == BatchResult()

    def test_requests_keep_their_tokens_in_any_order(self, tiny_model: MakeModel) -> None:
        worker = make_worker(tiny_model("llama"))
        requests = [prompt_share(str(length), length, first_block=8 * index) for index, length in enumerate((1, 30, 5))]
        alone = [worker.execute(Batch(step=1, requests=[request])).sampled for request in requests]
        together = worker.execute(Batch(step=2, requests=requests[::-1])).sampled
        for sampled in alone:
            ((name, token),) = sampled.items()
            assert together[name].token_id == token.token_id


class TestConnector:
    def test_order_of_calls(self, tiny_model: MakeModel) -> None:
        connector = RecordingConnector()
        worker = make_worker(tiny_model("llama"), connector)
        requests = [prompt_share("a", 9, first_block=3)]

        result = worker.execute(Batch(step=1, requests=requests, connector_metadata="meta"))

        layers = [call for layer in range(3) for call in (("wait", layer), ("save", layer))]
        assert connector.calls == [
            ("bind", "meta"),
            "start_load_kv",
            *layers,
            "wait_for_save",
            "get_finished",
            "clear",
        ]
        assert result.connector_output == OUTPUT
        assert result.sampled.keys() == {"a"}

    def test_a_step_without_requests_lets_it_report(self, tiny_model: MakeModel) -> None:
        connector = RecordingConnector()
        result = make_worker(tiny_model("llama"), connector).execute(Batch(step=1, connector_metadata="meta"))
        assert result == BatchResult(connector_output=OUTPUT)
        assert connector.calls == [("bind", "meta"), "start_load_kv", "wait_for_save", "get_finished", "clear"]

    @pytest.mark.parametrize("failing", ["start_load_kv", "wait", "save", "wait_for_save", "get_finished"])
    def test_metadata_is_cleared_when_a_step_fails(self, tiny_model: MakeModel, failing: str) -> None:
        connector = RecordingConnector(failing)
        worker = make_worker(tiny_model("llama"), connector)
        with pytest.raises(TimeoutError):
            worker.execute(Batch(step=1, requests=[prompt_share("a", 9, first_block=3)]))
        assert connector.calls[-1] == "clear"
        assert connector.calls.count("clear") == 1

    def test_is_given_the_caches_and_shut_down(self, tiny_model: MakeModel) -> None:
        connector = RecordingConnector()
        worker = make_worker(tiny_model("llama"), connector)
        assert [tuple(layer.shape) for layer in connector.kv_caches] == [(64, 2, BLOCK_SIZE, 2, 16)] * 3
        worker.shutdown()
        assert connector.calls == ["shutdown"]
        make_worker(tiny_model("llama")).shutdown()
