"""A real server on a free port in front of scripted nodes: tests choose the tokens, the delays and the failures."""

import functools
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer as TokenizerFile
from tokenizers import decoders, models, pre_tokenizers, trainers

from connector.codec import PROTOCOL_VERSION, encode
from connector.identity import ModelIdentity
from connector.kv_transfer_params import KVTransferParams
from connector.link import LinkHandler
from connector.server_messages import (
    Cancel,
    FromNode,
    Generate,
    NodeGoodbye,
    NodeHello,
    NodeLoad,
    NodePong,
    ReleaseKV,
    Role,
    ServerHello,
    ServerPing,
    TokenOutput,
    Tokens,
    decode_from_server,
)
from connector.zmq_link import ZmqLinks
from engine.model_config import ModelConfig
from engine.request import SampledToken
from server.api_keys import read_api_keys
from server.app import create_app
from server.config import ServerConfig
from server.http_server import HttpServer, bind, url_of
from server.model_assets import ModelAssets, load_model_assets
from server.service import Service
from server.tls import tls_context

MODEL_NAME = "tiny"
MAX_MODEL_LEN = 200
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SAMPLE_TEXT = (
    "The quick brown fox jumps over the lazy dog. Paris is the capital of France.",
    "Füchse überqueren Straßen; l'été à la plage; naïve café.",
    "Съешь же ещё этих мягких французских булок. 日本語のテキスト。 한국어 문장입니다.",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🎉",
)


@cache
def tokenizer_json() -> str:
    """A byte-level tokenizer with few merges, so that most characters outside ASCII take several tokens."""
    file = TokenizerFile(models.BPE())
    file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    file.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    file.train_from_iterator(SAMPLE_TEXT, trainer)
    return file.to_str()


CONFIG = {
    "model_type": "llama",
    "vocab_size": 350,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


@functools.cache
def config_digest() -> str:
    """What a node that serves `CONFIG` says of itself."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(CONFIG))
        return ModelConfig.from_checkpoint(Path(directory)).digest()


def write_model_directory(directory: Path, tokenizer: str | None = None, **generation_config: Any) -> Path:
    """A checkpoint directory without weights. `tokenizer`: another tokenizer.json than `tokenizer_json()`."""
    tokenizer_config = {
        "chat_template": CHAT_TEMPLATE,
        "eos_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer.json").write_text(tokenizer or tokenizer_json())
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "generation_config.json").write_text(json.dumps(generation_config))
    return directory


def make_identity(**changes: Any) -> ModelIdentity:
    fields: dict[str, Any] = {
        "config_digest": config_digest(),
        "weights_digest": "w",
        "dtype": "float32",
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 16,
        "block_size": 4,
    }
    return ModelIdentity(**(fields | changes))


Script = Callable[["FakeNode", Generate], None]


class FakeNode(LinkHandler):
    """The node's end of the server link. `script` decides how a request is answered; by default it is not."""

    def __init__(self, role: Role = "decode", name: str = "d0", *, address: str = "tcp://127.0.0.1:0") -> None:
        self.role, self.name, self.epoch = role, name, "e0"
        self.identity = make_identity()
        self.protocol_version = PROTOCOL_VERSION
        self.max_model_len = MAX_MODEL_LEN
        self.max_num_seqs = 0
        self.ready, self.reason = True, ""
        self.ready_peers: list[str] = []
        self.load = NodeLoad()
        self.silent = False
        self.script: Script = lambda node, generate: None
        self.generates: list[Generate] = []
        self.cancelled: list[str] = []
        self.released: list[KVTransferParams] = []
        self.peer = b""
        self._links = ZmqLinks(name)
        self._endpoint = self._links.listen(address, self)
        self.address = self._endpoint.address

    def on_message(self, peer: bytes, frames: Sequence[memoryview]) -> None:
        self.peer = peer
        message = decode_from_server.decode(frames[0])
        if self.silent:
            return
        match message:
            case ServerHello():
                self.send(self.hello())
            case ServerPing():
                self.send(self.pong(message.sequence))
            case Generate():
                self.generates.append(message)
                self.script(self, message)
            case Cancel():
                self.cancelled += message.request_ids
            case ReleaseKV():
                self.released.append(message.kv_transfer_params)

    def on_up(self, peer: bytes) -> None: ...

    def on_down(self, peer: bytes) -> None: ...

    def hello(self) -> NodeHello:
        return NodeHello(
            protocol_version=self.protocol_version,
            role=self.role,
            name=self.name,
            epoch=self.epoch,
            model=self.identity,
            max_model_len=self.max_model_len,
            num_blocks=100,
            max_num_seqs=self.max_num_seqs,
        )

    def pong(self, sequence: int) -> NodePong:
        return NodePong(
            sequence=sequence, ready=self.ready, reason=self.reason, load=self.load, ready_peers=self.ready_peers
        )

    def send(self, message: FromNode) -> None:
        self._endpoint.send([encode(message)], self.peer)

    def send_raw(self, data: bytes) -> None:
        self._endpoint.send([data], self.peer)

    def send_output(self, request_id: str, token_ids: Sequence[int] = (), **fields: Any) -> None:
        tokens = [SampledToken(token_id) for token_id in token_ids]
        self.send(Tokens(outputs=[TokenOutput(request_id=request_id, tokens=tokens, **fields)]))

    def goodbye(self) -> None:
        self.send(NodeGoodbye(reason="maintenance"))

    def close(self) -> None:
        self._links.close()


def answers(token_ids: Sequence[int], *, finish_reason: str = "length", **fields: Any) -> Script:
    """One token per message, as a node does, the last with the finish reason."""

    def script(node: FakeNode, generate: Generate) -> None:
        for position, token_id in enumerate(token_ids, start=1):
            last: dict[str, Any] = {"finish_reason": finish_reason, **fields} if position == len(token_ids) else {}
            node.send_output(generate.request_id, [token_id], **last)

    return script


def fails(kind: Any, error: str = "scripted") -> Script:
    def script(node: FakeNode, generate: Generate) -> None:
        node.send_output(generate.request_id, finish_reason="error", error_kind=kind, error=error)

    return script


class RunningServer:
    """A server in a thread, and a client for it."""

    def __init__(self, service: Service, url: str, http: HttpServer) -> None:
        self.service = service
        self.url = url
        self.http = http
        self.client = httpx.Client(base_url=url, timeout=20)

    @property
    def assets(self) -> ModelAssets:
        return self.service.assets

    def encode(self, text: str) -> list[int]:
        return self.assets.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.assets.tokenizer.decode(token_ids, skip_special_tokens=True)

    def complete(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "Hi", **body})

    def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hi"}]
        return self.client.post("/v1/chat/completions", json={"model": MODEL_NAME, "messages": messages, **body})

    def metric(self, name: str, **labels: str) -> float:
        return self.service.metrics.registry.get_sample_value(name, labels) or 0.0

    def wait_ready(self) -> None:
        wait_for(lambda: self.service.not_ready_reason is None)


@contextmanager
def running_server(
    directory: Path, decode: Sequence[str], prefill: Sequence[str] = (), **settings: Any
) -> Iterator[RunningServer]:
    """Serves until the block is left; fails if a request is left over."""
    config = ServerConfig(
        model=str(directory),
        served_model_name=(MODEL_NAME, "alias/of-it"),
        decode=tuple(decode),
        prefill=tuple(prefill),
        port=0,
        **{"heartbeat_interval": 0.05, "shutdown_timeout": 0.2, **settings},
    )
    links = ZmqLinks("server")
    with bind(config.host, config.port) as listener:
        service = Service(config, load_model_assets(directory))
        started = threading.Event()
        tls = tls_context(config.tls)
        http = HttpServer(
            create_app(service, links, read_api_keys(config.access)),
            drain=service.drain,
            on_listening=started.set,
            limits=config.limits,
            tls=tls,
        )
        thread = threading.Thread(target=http.run, kwargs={"sockets": [listener]})
        thread.start()
        server = RunningServer(service, url_of(listener, "https" if tls else "http"), http)
        try:
            assert started.wait(10)
            yield server
            wait_for(lambda: not service._generations)
        finally:
            server.client.close()
            http.should_exit = True
            thread.join(10)
            links.close()
    assert not thread.is_alive()


def wait_for(holds: Callable[[], object], timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream that ended as it must."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
