"""What operators and clients see when something is missing, going down, or cut: each its own status and JSON body."""

import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from connector.kv_transfer_params import KVTransferParams
from engine.errors import ErrorKind
from engine.sampling_params import SamplingParams
from tests.faults.processes import (
    IMPATIENT,
    MODEL_NAME,
    Front,
    NodeProcess,
    free_ports,
    front_process,
    node_process,
    process_ring,
)
from tests.faults.rig import GREEDY, assert_right, fault_ring, make_prompt
from tests.oracle import Oracle
from tests.relay import running_relay
from tests.ring import Client, node_config, running_client, running_node, wait_until


@pytest.fixture(scope="module")
def decode(tiny_llama: Path) -> Iterator[NodeProcess]:
    """A decode node without prefill nodes, for tests that leave it alive."""
    with node_process("decode", tiny_llama) as node:
        yield node


def closed_address() -> str:
    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


def error_of(reply: httpx.Response) -> tuple[int, str, str | None]:
    """(status, type, param) of a body as OpenAI's clients expect it."""
    error = reply.json()["error"]
    assert reply.headers["content-type"] == "application/json"
    assert (error.keys(), error["code"]) == ({"message", "type", "param", "code"}, reply.status_code)
    assert error["message"]
    return reply.status_code, error["type"], error["param"]


UNAVAILABLE = (503, "ServiceUnavailableError", None)


@contextmanager
def standing_still(node: NodeProcess) -> Iterator[None]:
    node.kill(signal.SIGSTOP)
    try:
        yield
    finally:
        node.kill(signal.SIGCONT)


@contextmanager
def open_stream(front: Front, **body: object) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    body = {"model": MODEL_NAME, "prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": True, **body}
    with httpx.stream("POST", f"{front.url}/v1/completions", json=body, timeout=30) as reply:
        assert reply.status_code == 200
        lines = (line for line in reply.iter_lines() if line)
        assert next(lines).startswith("data: ")
        yield lines


# -- nothing there


def test_an_unknown_model(tiny_llama: Path, decode: NodeProcess):
    with front_process(tiny_llama, "--decode", decode.where["address"]) as front:
        for stream in (False, True):
            assert error_of(front.complete(model="gpt-9", stream=stream)) == (404, "NotFoundError", "model")
        messages = [{"role": "user", "content": "x"}]
        reply = httpx.post(f"{front.url}/v1/chat/completions", json={"model": "gpt-9", "messages": messages})
        assert error_of(reply) == (404, "NotFoundError", "model")
        assert front.complete().status_code == 200


def test_no_decode_node(tiny_llama: Path):
    """Nothing listens where one should be, and another's port swallows what comes."""
    nobody = closed_address()
    with running_relay() as black_hole:
        flags = ("--decode", nobody, "--decode", black_hole.address)
        with front_process(tiny_llama, *flags, is_ready=False) as front:
            for stream in (False, True):
                reply = front.complete(stream=stream)
                assert error_of(reply) == UNAVAILABLE
                assert "retry-after" in reply.headers
                for address in (nobody, black_hole.address):
                    assert address in reply.json()["error"]["message"]
            assert (front.status("/ready"), front.status("/health")) == (503, 200)
            assert front.metric("vllm:admission_rejections_total") == 2


@pytest.mark.parametrize("fallback", ["local", "fail"])
def test_no_prefill_node(tiny_llama: Path, oracle: Oracle, fallback: str):
    """Nothing listens where one should be, another's port swallows what comes. Counted either way."""
    prompt = make_prompt(9, seed=500)
    with ExitStack() as stack:
        black_hole = stack.enter_context(running_relay())
        flags = ("--prefill", closed_address(), "--prefill", black_hole.address, "--fallback", fallback)
        decode = stack.enter_context(node_process("decode", tiny_llama, *flags))
        is_local = fallback == "local"
        front = stack.enter_context(front_process(tiny_llama, "--decode", decode.where["address"], is_ready=is_local))
        client = Client(decode.where["address"])
        stack.callback(client.close)
        _, answer = client.start(prompt, GREEDY)
        if is_local:
            assert_right(answer, oracle, prompt)
            assert front.complete().status_code == 200
            assert decode.counter("pdserve_local_prefills_without_node_total") == 2
        else:
            assert answer.final.error_kind is ErrorKind.NO_NODE_READY
            assert decode.counter("pdserve_kv_loads_without_node_total") == 1
            wait_until(lambda: "no prefill node" in front.complete().text, "the server knows why")
            assert error_of(front.complete()) == UNAVAILABLE
            assert front.metric("vllm:admission_rejections_total") >= 2


def test_a_decode_node_that_dies_with_requests(tiny_llama: Path):
    """502 for those that were under way, an event in their streams; 503 for those that come later."""
    with ExitStack() as stack:
        decode = stack.enter_context(node_process("decode", tiny_llama))
        front = stack.enter_context(front_process(tiny_llama, "--decode", decode.where["address"]))
        pool = stack.enter_context(ThreadPoolExecutor(2))
        lines = stack.enter_context(open_stream(front, max_tokens=240))
        decode.kill(signal.SIGSTOP)
        whole = pool.submit(front.complete)
        wait_until(lambda: front.metric("vllm:num_requests_waiting") == 1, "sent")
        decode.kill()
        assert error_of(whole.result(30)) == (502, "BadGatewayError", None)
        *_, event, done = lines
        assert done == "data: [DONE]"
        assert '"code":502' in event
        wait_until(lambda: front.status() == 503, "noticed")
        assert error_of(front.complete()) == UNAVAILABLE


# -- going down


def test_all_nodes_draining(tiny_llama: Path):
    """What streams goes on to its end; what comes is refused in words; every exit status is 0."""
    with ExitStack() as stack:
        ring = stack.enter_context(process_ring(tiny_llama, "--num-blocks", "256", "--drain-timeout", "60"))
        addresses = [node.where["address"] for node in (ring.decode, ring.prefill)]
        front = stack.enter_context(front_process(tiny_llama, "--decode", addresses[0], "--prefill", addresses[1]))
        with open_stream(front, max_tokens=900) as lines:
            for node in (ring.decode, ring.prefill):
                node.kill(signal.SIGTERM)
            wait_until(lambda: front.status() == 503, "noticed")
            reply = front.complete()
            assert error_of(reply) == UNAVAILABLE
            assert "shutting down" in reply.json()["error"]["message"]
            assert list(lines)[-1] == "data: [DONE]"
        assert [node.ended() for node in (ring.decode, ring.prefill)] == [0, 0]
        assert error_of(front.complete()) == UNAVAILABLE


def test_a_server_that_drains(tiny_llama: Path, decode: NodeProcess):
    """Streams end as they should, kept connections are told, the exit status is 0."""
    flags = ("--decode", decode.where["address"], "--shutdown-timeout", "20")
    with front_process(tiny_llama, *flags) as front, httpx.Client(base_url=front.url) as kept:
        assert kept.get("/ready").status_code == 200
        with open_stream(front) as lines:
            with standing_still(decode):
                front.kill(signal.SIGTERM)
                wait_until(lambda: kept.get("/ready").json()["reason"] == "shutting down", "it drains")
                reply = kept.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "x"})
                assert error_of(reply) == UNAVAILABLE
            assert list(lines)[-1] == "data: [DONE]"
        assert front.ended() == 0
        wait_until(decode.is_at_rest, "at rest")


# -- cut in the middle


PROMPT_BYTES = 3 * 40 * 2 * 2 * 16 * 4
"""KV of 40 tokens of the tiny model: layers, tokens, keys and values, heads, head size, float32."""


def test_a_connection_that_is_cut_in_the_middle_of_a_frame(tiny_llama: Path, oracle: Oracle):
    """Early, within each layer's unit, and before the last word: computed here, and the next one is sent again."""
    flags = ("--transport", "zmq", "--no-enable-prefix-caching")
    with running_relay() as relay, process_ring(tiny_llama, *flags, kv_address=relay.address, relay=relay) as ring:
        for number, share in enumerate((0.001, 0.2, 0.34, 0.6, 0.99)):
            prompt = make_prompt(40, seed=510 + number)
            relay.cut_after = relay.num_bytes_back + 500 + int(share * PROMPT_BYTES)
            assert_right(ring.client.start(prompt, GREEDY)[1], oracle, prompt)
            assert relay.cut_after is None, "it was cut"
            assert ring.decode.counter("pdserve_kv_loads_recomputed_total") == number + 1
            ring.wait_until_at_rest()
            ring.wait_until_met()
            assert_right(ring.client.start(prompt, GREEDY)[1], oracle, prompt)
            loaded = ring.decode.counter("pdserve_prompt_tokens_loaded_total")
            assert loaded == (number + 1) * len(prompt), "a silent fallback"
        ring.wait_until_at_rest()


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_after_a_cut_the_next_candidate_sends_the_rest(tiny_llama: Path, oracle: Oracle, share: float):
    prompt = make_prompt(40, seed=511)
    common = {"transport": "zmq", "early_admission": False}
    with ExitStack() as stack:
        prefill = [
            stack.enter_context(
                running_node("prefill", node_config(tiny_llama, name=name, **common), kv_listen="tcp://127.0.0.1:0")
            )
            for name in ("p0", "p1")
        ]
        relay = stack.enter_context(running_relay())
        relay.target = prefill[0].node.where["kv_address"]
        addresses = (relay.address, prefill[1].node.where["kv_address"])
        decode = stack.enter_context(running_node("decode", node_config(tiny_llama, **common), prefill=addresses))
        client = stack.enter_context(running_client(decode))
        receiver = decode.worker.receiver
        wait_until(lambda: len(receiver.ready_peers()) == 2, "both handshakes")
        relay.cut_after = relay.num_bytes_back + 500 + int(share * PROMPT_BYTES)
        _, answer = client.start(prompt, GREEDY, prefill_nodes=["p0", "p1"])
        assert_right(answer, oracle, prompt)
        assert (relay.cut_after, receiver.counters.num_next_candidates) == (None, 1)
        assert decode.engine.scheduler.counters.prompt_tokens_computed == 0
        for node in (decode, *prefill):
            wait_until(node.is_quiescent, f"at rest: {node.state()}")


# -- held KV whose holder is gone


@pytest.mark.parametrize("fate", ["killed", "restarted"])
def test_a_second_leg_whose_holder_died(tiny_llama: Path, oracle: Oracle, fate: str):
    """Its engine id names an address where nobody is, or somebody else is by now: computed here, at once."""
    prompt = make_prompt(21, seed=520)
    with process_ring(tiny_llama) as ring:
        params = hold(ring.prefill, prompt)
        ring.prefill.kill()
        if fate == "restarted":
            ring.prefill.restart()
            wait_until(lambda: ring.decode.get("/debug/state")["transfers"]["prefill_peers"][0]["state"] == "ready", "")
        assert_right(ring.client.start(prompt, GREEDY, kv_transfer_params=params)[1], oracle, prompt)
        assert ring.decode.counter("pdserve_kv_loads_recomputed_total") == 1
        ring.wait_until_at_rest(ring.decode, *([ring.prefill] if fate == "restarted" else []))


def test_a_second_leg_whose_holder_s_port_swallows_packets(tiny_llama: Path, oracle: Oracle):
    prompt = make_prompt(21, seed=521)
    flags = ("--transport", "zmq", "--lease-seconds", "1", *IMPATIENT)
    with running_relay() as relay, process_ring(tiny_llama, *flags, kv_address=relay.address, relay=relay) as ring:
        params = hold(ring.prefill, prompt)
        relay.swallow = True
        assert_right(ring.client.start(prompt, GREEDY, kv_transfer_params=params)[1], oracle, prompt)
        assert ring.decode.counter("pdserve_kv_loads_recomputed_total") == 1
        ring.wait_until_at_rest()
        assert ring.prefill.counter("pdserve_kv_leases_expired_total") == 1


def hold(node: NodeProcess, prompt: Sequence[int]) -> KVTransferParams:
    """The first leg."""
    client = Client(node.where["address"])
    try:
        final = client.generate(
            prompt, SamplingParams(max_tokens=1), kv_transfer_params=KVTransferParams(do_remote_decode=True)
        ).final
    finally:
        client.close()
    assert final.kv_transfer_params is not None
    return final.kv_transfer_params


def test_what_a_preempted_request_hands_off_is_whole(tiny_llama: Path, oracle: Oracle):
    """Three requests that generate in a pool for two, and are then held."""
    small = {"num_blocks": 14, "watermark_blocks": 0, "enable_prefix_caching": False}
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts = [make_prompt(9 + i, seed=530 + i) for i in range(3)]
    with fault_ring(tiny_llama, prefill=small) as ring, running_client(ring.prefill) as client:
        held = KVTransferParams(do_remote_decode=True)
        answers = [client.start(prompt, sampling, kv_transfer_params=held)[1] for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            params = answer.final.kv_transfer_params
            assert params is not None
            assert params.remote_num_tokens == len(prompt) + 15
            history = prompt + answer.token_ids + [7]
            assert_right(ring.client.start(history, GREEDY, kv_transfer_params=params)[1], oracle, history)
        assert ring.prefill.engine.scheduler.counters.num_preemptions > 0
        loaded = ring.decode.engine.scheduler.counters.prompt_tokens_loaded
        assert loaded == sum(len(prompt) + 15 for prompt in prompts)
