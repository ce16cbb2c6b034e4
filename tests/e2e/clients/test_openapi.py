"""Generated requests for everything that /openapi.json describes, right ones and wrong ones."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from schemathesis import Case, HookContext, Response, engine
from schemathesis.engine.events import EngineEvent, FatalError, NonFatalError, ScenarioFinished

from tests.e2e.processes import UpRing, running_up

MIN_REQUESTS, MIN_STREAMS = 2000, 20
DEADLINE = 20
"""Seconds for one request. The most that the tiny ring can be asked for takes about one."""
MAX_MODEL_LEN = "64"
"""Makes every generation a short one, whatever its request says: no generated body has to be changed for that."""
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
CONFIG = {
    "seed": 20261201,
    "workers": 1,
    "continue-on-failure": True,
    "request-timeout": DEADLINE,
    "max-stream-events": 10_000,
    "generation": {"deterministic": True, "mode": "all", "max-examples": 40, "no-shrink": True},
    "checks": {"enabled": False} | {check: {"enabled": True} for check in CHECKS},
    "phases": {"stateful": {"enabled": False}},
}


REQUIRED = {"prompt", "messages", "input", "tokens"}
MAX_OPTIONAL = 4


@pytest.fixture(scope="module")
def ring(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRing]:
    flags = ("--model", str(tiny_llama), "--served-model-name", "tiny", "--num-blocks", "2048", "--block-size", "4")
    with running_up(tmp_path_factory.mktemp("openapi"), *flags, "--max-model-len", MAX_MODEL_LEN) as ring:
        yield ring


def thin_out(context: HookContext, case: Case) -> Case:
    """Of the fields of a right body, keeps a few. With thirty of them there is always one that this model, or another
    field, does not allow, and every answer would be a 400. Wrong bodies stay as they are."""
    if case.meta is not None and case.meta.generation.mode.is_positive and isinstance(case.body, dict):
        rng = random.Random(repr(case.body))
        optional = sorted(case.body.keys() - REQUIRED - {"model"})
        kept = REQUIRED.union(rng.sample(optional, min(len(optional), rng.randint(0, MAX_OPTIONAL))))
        case.body = {name: value for name, value in case.body.items() if name in kept}
        if rng.random() < 0.3:
            case.body["stream"] = True
    return case


def is_stream(answer: Response | None) -> bool:
    return answer is not None and answer.headers.get("content-type", [""])[0].startswith("text/event-stream")


def complaints(event: EngineEvent) -> Iterator[str]:
    match event:
        case ScenarioFinished(recorder=recorder, label=label):
            for check in (check for checks in recorder.checks.values() for check in checks):
                if check.failure_info is not None:
                    failure = check.failure_info.failure
                    yield f"{label}: {failure.title}: {failure.message}\n{check.failure_info.code_sample}"
        case NonFatalError(label=label, value=error):
            yield f"{label}: {error!r}"
        case FatalError(exception=error):
            yield repr(error)


@pytest.mark.timeout(300)
def test_every_answer_is_one_that_its_schema_promises(ring: UpRing):
    schema = schemathesis.openapi.from_url(
        f"{ring.url}/openapi.json", config=schemathesis.Config.from_dict(CONFIG), timeout=DEADLINE
    )
    schema.hook("map_case")(thin_out)
    statuses: Counter[int] = Counter()
    streams: Counter[str] = Counter()
    found: list[str] = []
    for event in engine.from_schema(schema).execute():
        found += complaints(event)
        if isinstance(event, ScenarioFinished):
            answers = [interaction.response for interaction in event.recorder.interactions.values()]
            statuses.update(answer.status_code if answer else 0 for answer in answers)
            streams[event.label or ""] += sum(is_stream(answer) for answer in answers)
    print(f"{statuses.total()} requests: {dict(statuses)}; streams: {dict(+streams)}")
    assert not found, f"{len(found)} complaints, the first:\n" + "\n\n".join(found[:5])
    assert statuses.total() >= MIN_REQUESTS
    assert min(statuses) >= 200, "a request without an answer"
    assert min(statuses[200], statuses[400]) > MIN_REQUESTS // 10, statuses
    assert set(+streams) == {"POST /v1/completions", "POST /v1/chat/completions", "POST /v1/responses"}
    assert min((+streams).values()) >= MIN_STREAMS, streams
    ring.wait_until_quiescent()
