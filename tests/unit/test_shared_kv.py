import os
import subprocess
import sys

import pytest
import torch

from connector.peer_messages import SharedMemoryOffer
from connector.shared_kv import PeerKVMemory, PeerProcess, SharedKVMemory
from engine.errors import LinkError

SHAPE = (3, 2, 4, 2, 4)
LIKE = [torch.zeros(SHAPE), torch.zeros(SHAPE)]
NUM_BYTES = 2 * 4 * torch.Size(SHAPE).numel()


def changed(offer: SharedMemoryOffer, **fields: object) -> SharedMemoryOffer:
    return SharedMemoryOffer(**({name: getattr(offer, name) for name in offer.__struct_fields__} | fields))


def test_what_a_peer_writes_is_what_we_read():
    memory = SharedKVMemory(NUM_BYTES)
    ours = torch.frombuffer(memory.buffer, dtype=torch.float32).view(2, *SHAPE)
    theirs = PeerKVMemory(memory.offer(num_blocks=3), LIKE)
    theirs.kv_caches[1][2].fill_(7.0)
    assert ours[1, 2].eq(7).all()
    assert ours[0].eq(0).all()
    assert ours[1, :2].eq(0).all()
    memory.close()


@pytest.mark.parametrize(
    "change", [{"nonce": bytes(16)}, {"num_bytes": NUM_BYTES - 4}, {"num_blocks": 4}, {"fd": 9999}, {"pid": 2**22 + 1}]
)
def test_memory_that_is_not_the_offered_one_is_refused(change: dict[str, object]):
    memory = SharedKVMemory(NUM_BYTES)
    with pytest.raises(LinkError, match="memory"):
        PeerKVMemory(changed(memory.offer(num_blocks=3), **change), LIKE)
    memory.close()


def test_nothing_is_left_under_any_name():
    before = set(os.listdir("/dev/shm"))
    memory = SharedKVMemory(NUM_BYTES)
    assert set(os.listdir("/dev/shm")) == before
    memory.close()


def test_a_process_is_seen_to_end():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = PeerProcess(child.pid)
    assert not process.has_ended()
    child.communicate(b"\n")
    assert process.has_ended(within=5)
    process.close()
    with pytest.raises(LinkError, match="cannot watch"):
        PeerProcess(2**22 + 1)
