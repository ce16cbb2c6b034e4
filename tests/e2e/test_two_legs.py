"""A router that speaks vLLM's two-leg protocol before two `pdserve server --node`: the same tokens as the ring."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.faults.processes import ProcessRing, front_process, process_ring
from tests.two_leg_router import TwoLegRouter

BODY = {"prompt": "the quick brown fox jumps over it", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


class Fronts:
    """One HTTP front for each node of a ring, and one for the ring."""

    def __init__(self, model: Path, nodes: ProcessRing, stack: ExitStack) -> None:
        self.nodes = nodes
        self._model, self._stack = model, stack
        prefill, decode = nodes.prefill.where["address"], nodes.decode.where["address"]
        self.prefill = self._start("--node", prefill)
        self.decode = self._start("--node", decode)
        self.ring = self._start("--decode", decode, "--prefill", prefill)

    def _start(self, *nodes: str) -> str:
        return self._stack.enter_context(front_process(self._model, *nodes)).url


@pytest.fixture(scope="module")
def fronts(tiny_llama: Path) -> Iterator[Fronts]:
    with ExitStack() as stack:
        nodes = stack.enter_context(process_ring(tiny_llama, "--no-enable-prefix-caching"))
        yield Fronts(tiny_llama, nodes, stack)


def text_of(response: httpx.Response) -> str:
    return response.raise_for_status().json()["choices"][0]["text"]


def streamed_text(response: httpx.Response) -> str:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"])


def test_two_legs_give_the_ring_s_tokens_streamed_and_not(fronts: Fronts):
    expected = text_of(httpx.post(f"{fronts.ring}/v1/completions", json={"model": "tiny", **BODY}))
    loaded = fronts.nodes.decode.counter("pdserve_prompt_tokens_loaded_total")
    with TwoLegRouter(fronts.prefill, fronts.decode) as router:
        whole = router.complete(model="tiny", **BODY)
        assert text_of(whole.decode) == expected
        params = whole.prefill.json()["kv_transfer_params"]
        assert params["do_remote_prefill"] is True
        assert fronts.nodes.decode.counter("pdserve_prompt_tokens_loaded_total") == loaded + params["remote_num_tokens"]
        stream = router.complete(model="tiny", stream=True, **BODY)
        assert streamed_text(stream.decode) == expected
    fronts.nodes.wait_until_at_rest()


def test_chat_in_two_legs(fronts: Fronts):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    expected = httpx.post(f"{fronts.ring}/v1/chat/completions", json=body).json()["choices"][0]["message"]
    with TwoLegRouter(fronts.prefill, fronts.decode) as router:
        assert router.chat(**body).decode.json()["choices"][0]["message"] == expected
    fronts.nodes.wait_until_at_rest()


def test_a_second_leg_that_is_refused_frees_what_the_first_held(fronts: Fronts):
    with TwoLegRouter(fronts.prefill, fronts.decode) as router:
        first = router.prefill_leg("/v1/completions", {"model": "tiny", **BODY}, request_id="r")
        params = first.json()["kv_transfer_params"]
        assert fronts.nodes.prefill.get("/debug/state")["transfers"]["leases"] == 1
        body = {"model": "tiny", **BODY, "temperature": "hot", "kv_transfer_params": params}
        assert httpx.post(f"{fronts.decode}/v1/completions", json=body).status_code == 400
    fronts.nodes.wait_until_at_rest()


def test_what_only_the_node_can_refuse_names_the_field(fronts: Fronts):
    params = {"do_remote_decode": True}
    reply = httpx.post(f"{fronts.decode}/v1/completions", json={"model": "tiny", **BODY, "kv_transfer_params": params})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "kv_transfer_params.do_remote_decode")
    assert "--kv-listen" in error["message"]


def test_a_host_in_the_params_is_never_dialled(fronts: Fronts):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as trap, TwoLegRouter(fronts.prefill, fronts.decode) as router:
        trap.settimeout(0.2)
        first = router.prefill_leg("/v1/completions", {"model": "tiny", **BODY}, request_id="r")
        params = first.json()["kv_transfer_params"]
        params |= {"remote_host": "127.0.0.1", "remote_port": trap.getsockname()[1]}
        body = {"model": "tiny", **BODY, "kv_transfer_params": params}
        expected = text_of(httpx.post(f"{fronts.ring}/v1/completions", json={"model": "tiny", **BODY}))
        assert text_of(httpx.post(f"{fronts.decode}/v1/completions", json=body)) == expected
        with pytest.raises(TimeoutError):
            trap.accept()
    fronts.nodes.wait_until_at_rest()
