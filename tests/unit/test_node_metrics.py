from dataclasses import fields

import pytest

from connector import node_metrics as nm
from connector.decode_peer import SenderCounters
from connector.leases import LeaseCounters
from connector.loads import ReceiverCounters
from connector.p2p_scheduler import LocalPrefills
from engine.outputs import SchedulerCounters

SHOWN_AS_GAUGE = {"longest_barrier_seconds"}


@pytest.mark.parametrize(
    ("counters", "table"),
    [
        (SchedulerCounters, nm.ENGINE_COUNTERS),
        (SenderCounters, nm.SENDER_COUNTERS),
        (ReceiverCounters, nm.RECEIVER_COUNTERS),
        (LeaseCounters, nm.LEASE_COUNTERS),
        (LocalPrefills, nm.LOCAL_COUNTERS),
    ],
)
def test_every_counter_is_exported(counters: type, table: nm.Table):
    assert {field.name for field in fields(counters)} - SHOWN_AS_GAUGE == set(table)


def test_no_two_counters_share_a_name():
    tables = (nm.ENGINE_COUNTERS, nm.SENDER_COUNTERS, nm.RECEIVER_COUNTERS, nm.LEASE_COUNTERS, nm.LOCAL_COUNTERS)
    names = [name for table in tables for name, _ in table.values()]
    assert len(names) == len(set(names))
