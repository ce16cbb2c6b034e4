"""`pdserve up` from start to stop, and what happens when something in it dies."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.processes import STOP_TIMEOUT, is_running, running_up, start_command, wait_until

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.demo_model
def test_the_demo_model_says_paris_streamed_and_not(tmp_path: Path):
    with running_up(tmp_path, "--dtype", "float32") as ring:
        with openai.OpenAI(base_url=f"{ring.url}/v1", api_key="none") as client:
            ask = {"model": "smollm2-135m", "messages": QUESTION, "temperature": 0}
            whole = client.chat.completions.create(**ask)
            assert whole.choices[0].message.content == "The capital of France is Paris."
            assert whole.choices[0].finish_reason == "stop"
            assert ring.metrics("decode-0")["pdserve_kv_bytes_received_total"] > 0
            assert ring.metrics("decode-0")["pdserve_prompt_tokens_computed_total"] == 0
            parts = [
                chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**ask, stream=True)
            ]
            assert "".join(parts) == whole.choices[0].message.content
            assert len([part for part in parts if part]) > 3, "it came in one piece"
        assert "curl " in ring.command.output
        ring.wait_until_quiescent()


def test_several_nodes_of_each_kind(tiny_llama: Path, tmp_path: Path):
    flags = ("--model", str(tiny_llama), "--prefill-nodes", "2", "--decode-nodes", "2", "--num-blocks", "64")
    with running_up(tmp_path, *flags) as ring:
        assert [process["name"] for process in ring.processes] == [
            "prefill-0",
            "prefill-1",
            "decode-0",
            "decode-1",
            "server",
        ]
        for _ in range(8):
            body = {"model": str(tiny_llama), "prompt": "hello there", "max_tokens": 3}
            httpx.post(f"{ring.url}/v1/completions", json=body).raise_for_status()
        for node in ("decode-0", "decode-1"):
            assert ring.metrics(node)["vllm:generation_tokens_total"] > 0
        ring.wait_until_quiescent()


def test_without_prefill_nodes_the_decode_node_computes_prompts(tiny_llama: Path, tmp_path: Path):
    with running_up(tmp_path, "--model", str(tiny_llama), "--prefill-nodes", "0", "--num-blocks", "64") as ring:
        body = {"model": str(tiny_llama), "prompt": "hello there", "max_tokens": 3}
        httpx.post(f"{ring.url}/v1/completions", json=body).raise_for_status()
        assert ring.metrics("decode-0")["pdserve_prompt_tokens_computed_total"] > 0


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "server"])
def test_a_child_that_dies_stops_the_rest_and_is_named(tiny_llama: Path, tmp_path: Path, victim: str):
    with running_up(tmp_path, "--model", str(tiny_llama), "--num-blocks", "64", expect_clean_end=False) as ring:
        os.kill(ring.pid(victim), signal.SIGKILL)
        assert ring.command.wait(STOP_TIMEOUT) == 1
        assert f"{victim} (pid {ring.pid(victim)}) was killed by signal 9" in ring.command.output
        assert not [p for p in ring.processes if is_running(p["pid"])]


def test_children_end_when_the_launcher_is_killed(tiny_llama: Path, tmp_path: Path):
    with running_up(tmp_path, "--model", str(tiny_llama), "--num-blocks", "64", expect_clean_end=False) as ring:
        ring.command.process.kill()
        wait_until(lambda: not [p for p in ring.processes if is_running(p["pid"])], "all gone", STOP_TIMEOUT)


def run_to_its_end(*argv: str) -> tuple[int, str]:
    command = start_command(*argv)
    try:
        status = command.wait(60)
    finally:
        command.process.kill()
        command.process.stdout.close()
    return status, command.output


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["up", "--model", "no-such-model"], "--model"),
        (["up", "--model", "/no/such/file.gguf"], "--model"),
        (["up", "--decode-nodes", "0"], "--decode-nodes must be at least 1, got 0"),
        (["up", "--num-blok", "3"], "--num-blok"),
        (["up", "--tool-call-parser", "qwen9"], "--tool-call-parser must be one of auto, hermes"),
        (["up", "--port", "many"], "--port"),
        (["decode", "--model", "MODEL", "--num-blocks", "4", "--max-model-len", "512"], "--num-blocks"),
        (["decode", "--model", "MODEL", "--max-model-len", "99999"], "--max-model-len"),
        (["decode", "--model", "MODEL", "--kv-cache-bytes", "10"], "--kv-cache-bytes"),
        (["decode", "--model", "MODEL", "--kv-cache-bytes", str(1 << 50)], "--kv-cache-bytes"),
        (["decode", "--model", "MODEL", "--cpus", "4095"], "--cpus"),
        (["decode", "--model", "MODEL", "--listen", "nonsense"], "--listen"),
        (["prefill", "--model", "MODEL", "--kv-connector", "nixl"], "--kv-connector"),
        (["server", "--model", "MODEL"], "--decode"),
        (["dance"], "unknown command 'dance'"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_a_bad_setting_is_one_clear_message(tiny_llama: Path, argv: list[str], says: str):
    status, output = run_to_its_end(*(str(tiny_llama) if word == "MODEL" else word for word in argv))
    assert status == 2, output
    assert says in output
    assert "Traceback" not in output


def test_a_port_in_use_is_named(tiny_llama: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        model = ("--model", str(tiny_llama))
        for argv, flag in (
            (("up", *model, "--port", str(port)), "--port"),
            (("server", *model, "--decode", "tcp://127.0.0.1:1", "--port", str(port)), "--port"),
            (("decode", *model, "--listen", f"tcp://127.0.0.1:{port}", "--admin-port", "0"), "--listen"),
            (("decode", *model, "--listen", "tcp://127.0.0.1:0", "--admin-port", str(port)), "--admin-port"),
            (
                (
                    "prefill",
                    *model,
                    "--kv-listen",
                    f"tcp://127.0.0.1:{port}",
                    "--listen",
                    "tcp://127.0.0.1:0",
                    "--admin-port",
                    "0",
                ),
                "--kv-listen",
            ),
        ):
            status, output = run_to_its_end(*argv)
            assert (status, flag in output, str(port) in output) == (2, True, True), output


def test_the_server_process_never_loads_torch():
    code = (
        "import sys, server.__main__; print([m for m in ('torch', 'safetensors', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
