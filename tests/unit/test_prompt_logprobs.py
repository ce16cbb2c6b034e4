"""Prompt logprobs as they are computed and packed."""

from dataclasses import replace

import pytest
import torch

from connector.codec import Decoder, encode
from connector.peer_messages import FromPrefill, PromptPiece
from engine import prompt_scorer
from engine.batch import ScheduledRequest
from engine.errors import MalformedMessage
from engine.prompt_logprobs import MAX_PIECE_POSITIONS, PromptLogprobs, WantedLogprobs
from engine.prompt_scorer import score_prompt
from engine.sampling_params import MAX_LOGPROBS

VOCAB = 50


def make_share(next_token_ids: list[int], num_top: int, start: int = 0) -> ScheduledRequest:
    return ScheduledRequest(
        request_id="r",
        token_ids=[0] * len(next_token_ids),
        num_computed_tokens=start,
        block_ids=[],
        sampling=None,
        prompt_logprobs=WantedLogprobs(num_top, next_token_ids),
    )


def make_piece(**changes: object) -> PromptLogprobs:
    piece = PromptLogprobs(
        start=1, num_top=2, logprobs=bytes(12), ranks=bytes(12), top_token_ids=bytes(24), top_logprobs=bytes(24)
    )
    return replace(piece, **changes)


@pytest.mark.parametrize("max_logits", [1 << 24, 7 * VOCAB, 1])
@pytest.mark.parametrize("num_top", [0, 3, MAX_LOGPROBS])
def test_slices_are_pieces_of_the_whole(monkeypatch: pytest.MonkeyPatch, max_logits: int, num_top: int):
    monkeypatch.setattr(prompt_scorer, "MAX_SLICE_LOGITS", max_logits)
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    logits[4, :5] = logits[4].max() + 1  # equals: none of them is before another
    targets = [3, *range(19)]
    seen = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return rows

    pieces = score_prompt(logits, make_share(targets, num_top, start=6), head, VOCAB)
    assert max(seen) <= max(1, max_logits // VOCAB)
    assert [piece.start for piece in pieces] == [7, *(piece.end for piece in pieces[:-1])]
    assert pieces[-1].end == 27
    entries = [entry for piece in pieces for entry in piece]
    for entry, row, target in zip(entries, logits.log_softmax(-1), targets, strict=True):
        assert entry.logprob == pytest.approx(float(row[target]), abs=1e-6)
        assert entry.rank == 1 + int((row > row[target]).sum())
        values, ids = row.topk(num_top)
        assert [i for i, _ in entry.top_logprobs] == ids.tolist()
        assert [value for _, value in entry.top_logprobs] == pytest.approx(values.tolist(), abs=1e-6)
    assert entries[4].rank == 1


def test_a_long_prompt_is_many_small_messages():
    logits = torch.zeros(2 * MAX_PIECE_POSITIONS + 1, VOCAB)
    pieces = score_prompt(logits, make_share([0] * len(logits), MAX_LOGPROBS), lambda rows: rows, VOCAB)
    messages = [encode(PromptPiece(transfer_id="t", epoch="e", logprobs=piece)) for piece in pieces]
    assert len(messages) == 3
    assert max(map(len, messages)) < 180_000
    decoded = Decoder[FromPrefill](FromPrefill).decode(messages[0])
    assert isinstance(decoded, PromptPiece)
    assert decoded.logprobs == pieces[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"start": 0},
        {"num_top": 1},
        {"num_top": -1},
        {"num_top": MAX_LOGPROBS + 1},
        {"logprobs": b""},
        {"ranks": b""},
        {"ranks": bytes(4 * (MAX_PIECE_POSITIONS + 1))},
        {"top_logprobs": bytes(23)},
        {"top_token_ids": bytes(25)},
    ],
)
def test_parts_that_do_not_belong_together(changes: dict[str, object]):
    with pytest.raises(ValueError, match="prompt logprobs"):
        make_piece(**changes)
    message = encode(PromptPiece(transfer_id="t", epoch="e", logprobs=make_piece()))
    assert Decoder[FromPrefill](FromPrefill).decode(message)
    with pytest.raises(MalformedMessage):
        Decoder[FromPrefill](FromPrefill).decode(message.replace(b"\xa5start\x01", b"\xa5start\x00"))
