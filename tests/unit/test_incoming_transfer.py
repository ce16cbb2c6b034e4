from hypothesis import given
from hypothesis import strategies as st

from connector.incoming_transfer import IncomingTransfer
from connector.peer_messages import PrefillDone


def make_transfer(start: int = 16, end: int = 64, num_layers: int = 2) -> IncomingTransfer:
    return IncomingTransfer(
        transfer_id="t",
        request_id="r",
        start=start,
        end=end,
        block_ids=range(8),
        num_layers=num_layers,
        granted_at=1.0,
    )


def done() -> PrefillDone:
    return PrefillDone(transfer_id="t", epoch="e", computed_at=0.0)


@given(st.permutations(range(16, 64, 8)), st.integers(0, 5))
def test_units_in_any_order_and_again_complete_a_layer(starts: list[int], again: int):
    transfer = make_transfer()
    for count, start in enumerate([*starts[: again + 1], *starts]):
        assert not transfer.is_layer_complete(0) or count >= len(starts)
        transfer.add(0, start, start + 8, now=2.0)
    assert transfer.is_layer_complete(0)
    assert not transfer.is_layer_complete(1)


def test_complete_needs_every_layer_and_the_senders_word():
    transfer = make_transfer()
    transfer.add(0, 16, 64, now=2.0)
    transfer.done = done()
    assert not transfer.is_complete
    transfer.add(1, 16, 40, now=3.0)
    transfer.add(1, 41, 64, now=3.0)
    assert not transfer.is_complete, "position 40 is missing"
    transfer.add(1, 40, 41, now=4.0)
    assert transfer.is_complete
    assert transfer.layer_complete_at == [2.0, 4.0]


def test_what_was_not_granted_does_not_fit():
    transfer = make_transfer()
    assert transfer.fits(1, 16, 64)
    assert not transfer.fits(2, 16, 64)
    assert not transfer.fits(0, 15, 64)
    assert not transfer.fits(0, 16, 65)
    assert not transfer.fits(0, 20, 20)
