"""Who may share memory with whom: pairs, hosts, GPUs and bytes, in faked machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mok_megatron import peers
from mok_megatron.peers import CLOSED, FINE, PLAIN, UNSEEN, Card
from tests.ranks import run_ranks

ONE = Card(host=7, uuid_high=1, uuid_low=0, wanted=100, free=1000, config=5, nonce=3)


def cards(count: int, **changed: object) -> list[Card]:
    """Ranks of one host with a GPU each; changed: of the last one."""
    every = [replace(ONE, uuid_low=rank) for rank in range(count)]
    return [*every[:-1], replace(every[-1], **changed)]


def test_equal_ranks_with_a_gpu_each_are_fine() -> None:
    every = cards(4)
    assert peers.settings_fault(every) is None
    assert peers.place_fault(every, overlap=False) is None
    assert peers.memory_fault(every) is None
    assert peers.link_fault([[FINE] * 4] * 4) is None


@pytest.mark.parametrize("changed", [{"config": 6}, {"wanted": 101}], ids=["shape", "bytes"])
def test_ranks_that_differ_are_named(changed: dict[str, int]) -> None:
    fault = peers.settings_fault(cards(3, **changed))
    assert fault is not None
    assert "--mok-max-tokens and --mok-row-budget, got another fingerprint" in str(fault)
    assert "on rank 2 than on rank 0" in str(fault)
    assert fault.rank == 2


def test_the_rank_that_differs_may_be_the_first() -> None:
    fault = peers.settings_fault([replace(ONE, config=6), *cards(4)[1:]])
    assert fault is not None
    assert "on rank 0 than on rank 1" in str(fault)
    assert fault.rank == 0


def test_two_hosts_are_refused() -> None:
    fault = peers.place_fault(cards(3, host=8), overlap=True)
    assert fault is not None
    assert "must lie on one host, got rank 0 and rank 2 on two; use a smaller" in fault
    assert "--moe-token-dispatcher-type alltoall" in fault


def test_one_gpu_for_two_ranks_is_for_tests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    every = cards(3, uuid_low=0)
    fault = peers.place_fault(every, overlap=False)
    assert fault is not None
    assert "got rank 0 and rank 2 on one; call torch.cuda.set_device" in fault
    assert peers.place_fault(every, overlap=True) is None
    monkeypatch.delenv(peers.OVERLAP, raising=False)
    assert not peers.overlap_allowed()
    monkeypatch.setenv(peers.OVERLAP, "1")
    assert peers.overlap_allowed()


def test_what_a_rank_reaches() -> None:
    """Ranks 1, 2 and 3 of five on GPUs without access, without atomics, unseen; 4 on rank 0's."""
    every = cards(5, uuid_low=0)
    visible = {(1, 0): 4, (1, 1): 0, (1, 2): 2}
    links = {(4, 0): (False, False), (4, 2): (True, False)}
    found = peers.reaches_of(every, 0, visible, lambda a, b: links[a, b])
    assert found == [FINE, CLOSED, PLAIN, UNSEEN, FINE]
    both = peers.reaches_of(every, 0, dict(visible), lambda a, b: (True, True))
    assert both == [FINE, FINE, FINE, UNSEEN, FINE]


class _Driver:
    """A libcuda that writes native atomics into the answer and then returns `error`."""

    def __init__(self, error: int, says: int) -> None:
        self.error, self.says = error, says

    def cuDeviceGetP2PAttribute(self, into: Any, which: int, a: int, b: int) -> int:
        assert (which, a, b) == (3, 2, 5)
        into._obj.value = self.says
        return self.error


def test_a_query_that_the_driver_refuses_is_an_error_not_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever it has left behind: not an unreachable GPU either, for which others stop too."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) == (2, 5))
    every, visible = cards(2), {(1, 0): 2, (1, 1): 5}
    for says, link in ((1, FINE), (0, PLAIN)):
        for error in (0, 101, 802):
            driver = _Driver(error, says)
            monkeypatch.setattr(peers.ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
            if not error:
                assert peers.reaches_of(every, 0, visible, peers._attribute) == [FINE, link]
                continue
            with pytest.raises(RuntimeError) as raised:
                peers.reaches_of(every, 0, visible, peers._attribute)
            rule = "mok: the driver must say whether GPU 2 has native atomics on GPU 5"
            remedy = "run python -m mok_megatron.doctor"
            assert str(raised.value) == f"{rule}, got error {error}; {remedy}"


@pytest.mark.parametrize(
    ("link", "words"),
    [
        (UNSEEN, "rank 1's GPU is hidden from rank 2 (2 of 6 pairs fail); leave CUDA_VISIBLE_DEV"),
        (
            CLOSED,
            "no peer access from the GPU of rank 2 to that of rank 1 (2 of 6 pairs fail); use",
        ),
        (PLAIN, "no native atomics from the GPU of rank 2 on the memory of that of rank 1 (2 of"),
    ],
    ids=["hidden", "no-access", "no-atomics"],
)
def test_a_pair_that_cannot_is_named(link: int, words: str) -> None:
    links = [[FINE] * 3, [FINE] * 3, [FINE, link, FINE]]
    links[2][0] = FINE
    fault = peers.link_fault([*links[:2], [FINE, link, link]])
    assert fault is not None
    assert words in fault
    assert "--moe-token-dispatcher-type alltoall" in fault


def test_ranks_of_one_gpu_need_its_memory_together() -> None:
    assert peers.memory_fault(cards(2, free=100)) is None
    fault = peers.memory_fault(cards(2, free=99))
    assert fault is not None
    assert "(100 bytes), got 0.00 GiB (99 bytes) free on that of rank 1; lower --mok-row" in fault
    fault = peers.memory_fault(cards(3, uuid_low=0, free=199))
    assert fault is not None
    assert "(200 bytes), got 0.00 GiB (199 bytes) free on that of rank 0" in fault
    assert peers.memory_fault(cards(3, uuid_low=0, free=200)) is None


def test_sixteen_bytes_are_two_words() -> None:
    raw = bytes(range(248, 256)) + bytes(range(8))
    high, low = peers.words(raw)
    both = [number.to_bytes(8, "little", signed=True) for number in (low, high)]
    assert b"".join(both) == raw
    assert -(2**63) <= peers.fingerprint("a", 1) < 2**63
    assert peers.fingerprint("a", 1) != peers.fingerprint("a", 2)


def _meet(rank: int, world: int) -> list[list[int] | str]:
    """Cards of a group that is not the world: all fine; rank 2 reaches nobody; all differ."""
    import torch.distributed as dist

    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    found: list[list[int] | str] = []
    for wrong in ("", "link", "config"):
        row = [FINE, FINE] if wrong != "link" or rank != 2 else [CLOSED, FINE]
        peers.reaches = lambda every, here, row=row: row
        mine = replace(ONE, uuid_low=rank, config=rank if wrong == "config" else 5)
        try:
            found.append([one.uuid_low for one in peers.meet(group, mine)])
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_a_group_meets_in_its_own_order_and_raises_together() -> None:
    zero, one, two, three = run_ranks(4, _meet)
    assert [zero, one] == [two, three]
    assert [zero[0], one[:2]] == [[0, 2], [[1, 3], [1, 3]]]
    assert "no peer access from the GPU of rank 1 to that of rank 0 (1 of 2 pairs fail)" in zero[1]
    assert "mok: the ranks of an expert parallel group must agree" in zero[2]
    assert "(2, 100 bytes) on rank 1 than on rank 0 (0, 100 bytes)" in zero[2]
