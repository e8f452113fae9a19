"""Whether the ranks of a group can share memory, found out before any of it is allocated.

Every rank tells its peers who it is in one row of integers (Card), and then what it can do with
each peer's GPU. So every rank sees all that any rank knows, and all raise the same words, or none.
What travels is tensors of a fixed size: nothing is unpickled, no rank is assumed to be anywhere.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

ALLTOALL = "--moe-token-dispatcher-type alltoall"
_SMALLER = f"use a smaller --expert-model-parallel-size, whose ranks do, or {ALLTOALL}"
OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_NATIVE_ATOMIC_SUPPORTED = 3  # of CUdevice_P2PAttribute

# What a rank can do with a peer's memory.
FINE, UNSEEN, CLOSED, PLAIN = range(4)
_WHY = {
    UNSEEN: (
        "a rank must see its peers' GPUs",
        "rank {b}'s GPU is hidden from rank {a}",
        f"leave CUDA_VISIBLE_DEVICES the same on all ranks of a host, or {ALLTOALL}",
    ),
    CLOSED: (
        "expert parallel ranks must reach each other's memory",
        "no peer access from the GPU of rank {a} to that of rank {b}",
        f"{_SMALLER}; nvidia-smi topo -p2p r has the driver's reason",
    ),
    PLAIN: (
        "expert parallel ranks must be joined by NVLink",
        "no native atomics from the GPU of rank {a} on the memory of that of rank {b}",
        _SMALLER,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Card:
    """A rank, in 64-bit integers. host: of the boot; uuid: of the GPU, in two words; wanted, free:
    bytes; config: fingerprint of what must be equal; nonce: what its memory will hold when peers
    look for it."""

    host: int
    uuid_high: int
    uuid_low: int
    wanted: int
    free: int
    config: int
    nonce: int

    @property
    def uuid(self) -> tuple[int, int]:
        return self.uuid_high, self.uuid_low


def card(device: torch.device, *, wanted: int, free: int, config: int) -> Card:
    """This rank's, for a CUDA device."""
    high, low = words(_uuid(device))
    return Card(
        host=host(),
        uuid_high=high,
        uuid_low=low,
        wanted=wanted,
        free=free,
        config=config,
        nonce=secrets.randbits(63),
    )


def _uuid(device: torch.device) -> bytes:
    return uuid.UUID(str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")).bytes


def words(sixteen: bytes) -> tuple[int, int]:
    """16 bytes as two signed integers."""
    low, high = (int.from_bytes(sixteen[i : i + 8], "little", signed=True) for i in (0, 8))
    return high, low


def fingerprint(*parts: object) -> int:
    """The same 63 bits in every process for parts of the same repr."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def host() -> int:
    """One number for all processes of a running machine, containers included."""
    return fingerprint(Path("/proc/sys/kernel/random/boot_id").read_text().strip())


def gather(group: ProcessGroup, numbers: Sequence[int]) -> list[list[int]]:
    """Every rank's numbers, in the order of the group's ranks; as many on each. It is a barrier:
    when it returns, every rank has called it."""
    on_host = torch.device("cpu") in group._device_types
    device = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
    mine = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    every = torch.empty(group.size(), len(mine), dtype=torch.int64, device=device)
    dist.all_gather(list(every), mine, group=group)
    return every.tolist()


def meet(group: ProcessGroup, mine: Card) -> list[Card]:
    """Every rank's card. Collective.

    Raises RuntimeError (rule, value, remedy), on all ranks or none, when two ranks differ in what
    must be equal, or cannot share memory.
    """
    names = [field.name for field in fields(Card)]
    cards = [
        Card(**dict(zip(names, row, strict=True))) for row in gather(group, list(astuple(mine)))
    ]
    if (differs := settings_fault(cards)) is not None:
        raise differs
    _raise(place_fault(cards, overlap_allowed()))
    links = gather(group, reaches(cards, group.rank()))
    _raise(link_fault(links) or memory_fault(cards))
    return cards


def overlap_allowed() -> bool:
    """May several ranks share a GPU? torch's own variable; tests set it."""
    return os.environ.get(OVERLAP) == "1"


class Differs(RuntimeError):
    """A rank of the group was launched with other flags than most."""

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(f"mok: {text}")
        self.rank = rank


def settings_fault(cards: Sequence[Card]) -> Differs | None:
    """A rank that would call with other shapes or limits than most."""
    wanted = Counter((card.config, card.wanted) for card in cards).most_common(1)[0][0]
    of = [(card.config, card.wanted) for card in cards].index(wanted)
    for rank, other in enumerate(cards):
        if (other.config, other.wanted) != wanted:
            return Differs(
                "the ranks of an expert parallel group must agree on the layer's shape, "
                "--mok-max-tokens and --mok-row-budget, got another fingerprint "
                f"({other.config:x}, {other.wanted} bytes) on rank {rank} than on rank {of} "
                f"({wanted[0]:x}, {wanted[1]} bytes); launch all ranks with the same flags",
                rank,
            )
    return None


def place_fault(cards: Sequence[Card], overlap: bool) -> str | None:
    """Ranks on several hosts; two ranks on one GPU."""
    first: dict[tuple[int, int], int] = {}
    for rank, other in enumerate(cards):
        if other.host != cards[0].host:
            return (
                "an expert parallel group must lie on one host, got rank 0 and rank "
                f"{rank} on two; {_SMALLER}"
            )
        sharing = first.setdefault(other.uuid, rank)
        if sharing != rank and not overlap:
            return (
                f"each rank must have a GPU of its own, got rank {sharing} and rank {rank} on one; "
                f"call torch.cuda.set_device(local rank) first, or, in a test, set {OVERLAP}=1"
            )
    return None


def reaches(cards: Sequence[Card], rank: int) -> list[int]:
    """What rank's GPU can do with the memory of each: FINE, UNSEEN, CLOSED, PLAIN."""
    visible = {words(_uuid(torch.device("cuda", d))): d for d in range(torch.cuda.device_count())}
    return reaches_of(cards, rank, visible, _attribute)


def reaches_of(
    cards: Sequence[Card],
    rank: int,
    visible: dict[tuple[int, int], int],
    attribute: Callable[[int, int], tuple[bool, bool]],
) -> list[int]:
    """The same; attribute(a, b) says of two visible devices: access, native atomics."""
    found = []
    for other in cards:
        if other.uuid == cards[rank].uuid:
            found.append(FINE)
        elif other.uuid not in visible:
            found.append(UNSEEN)
        else:
            access, atomics = attribute(visible[cards[rank].uuid], visible[other.uuid])
            found.append(FINE if access and atomics else PLAIN if access else CLOSED)
    return found


def _attribute(a: int, b: int) -> tuple[bool, bool]:
    value = ctypes.c_int()
    cuda = ctypes.CDLL("libcuda.so.1")
    if error := cuda.cuDeviceGetP2PAttribute(
        ctypes.byref(value), _NATIVE_ATOMIC_SUPPORTED, a, b
    ):  # of visible devices, whose numbers are torch's
        raise RuntimeError(
            f"mok: the driver must say whether GPU {a} has native atomics on GPU {b}, got error "
            f"{error}; run python -m mok_megatron.doctor"
        )
    return torch.cuda.can_device_access_peer(a, b), bool(value.value)


def link_fault(links: Sequence[Sequence[int]]) -> str | None:
    """links[a][b]: what a can do with b's memory. The first pair that cannot, and how many."""
    wrong = [(a, b) for a, row in enumerate(links) for b, link in enumerate(row) if link != FINE]
    if not wrong:
        return None
    a, b = wrong[0]
    rule, found, remedy = _WHY[links[a][b]]
    pairs = len(links) * (len(links) - 1)
    return f"{rule}, got {found.format(a=a, b=b)} ({len(wrong)} of {pairs} pairs fail); {remedy}"


def memory_fault(cards: Sequence[Card]) -> str | None:
    """The first GPU without room for the workspaces of its ranks."""
    for rank, one in enumerate(cards):
        sharing = [other for other in cards if other.uuid == one.uuid]
        wanted, free = sum(c.wanted for c in sharing), min(c.free for c in sharing)
        if wanted > free:
            return (
                f"a GPU must have room for its workspace, {gib(wanted)}, got {gib(free)} free on "
                f"that of rank {rank}; lower --mok-row-budget or --mok-max-tokens, take smaller "
                f"micro-batches, or use {ALLTOALL}"
            )
    return None


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB ({count} bytes)"


def _raise(fault: str | None) -> None:
    if fault is not None:
        raise RuntimeError(f"mok: {fault}")
