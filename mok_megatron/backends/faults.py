"""What the device found wrong in a call, and how the host says it.

The device writes the first fault into pinned host memory and fills the call's results with NaN; the
host reads one word there, without waiting: in each call, and before an optimizer changes anything.
For that, every step of a torch.optim.Optimizer (Megatron's optimizers hold one each) first waits
for the current stream, which Megatron's reading of the gradient norm has done just before. So no
parameter changes after a fault on this rank. On other ranks the gradient norm is NaN then, which
Megatron's --check-for-nan-in-loss-and-grad (its default) stops.

A wait of the device that ends by its deadline is written down for good (check.h's record), and no
call is made after it. If it was for another rank, nobody in this process waits for one any more,
nor do the others, who are told, with the first's number and reason (csrc/device/symmetric.cuh):
grids end, their results are NaN, and the CUDA context lives on. Any other stops the launch: the
context is dead, and torch raises at whatever it does next. A thread of the host, which looks at the
record once a second, writes down who was waited for, in which call.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import re
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mok_megatron.backends import calls
from mok_megatron.backends.rules import CallFault, not_finite
from mok_megatron.contract import OVERFULL
from mok_megatron.records import MERGE, Record, directory

_DUPLICATE, _NOT_FINITE = 2, 3  # RouteFaultKind in csrc/layer_arguments.h
_TOKENS, _ROWS = 6, 7  # ExchangeFaultKind in csrc/exchange_arguments.h; and 1 to 5:
_FIELDS: dict[int, tuple[str, dict[int, str]]] = {
    1: ("layer", {}),
    2: ("direction", {1: "forward", 2: "backward"}),
    3: ("forward call", {}),
    4: ("row buffers of", {}),
    5: ("fingerprint of shape, flags and version", {}),
}
_COUNTED = {  # and on; Count in csrc/device/census.cuh
    8: "pieces of rows moved in",
    9: "as the sum of the slots moved in",
    10: "pieces of rows sent home to other ranks",
    11: "pieces of rows added up",
    12: "as the sum of the slots added up",
}
_START, _COMBINE_HOME, _ABORTED = 18, 19, 24  # Tag in csrc/check.h: waits for another rank
_LOOK_S, _SETTLE_S = 1.0, 0.1
_NO_ROOM = re.compile(r"no room for (\d+) bytes")  # in csrc/tensor_checks.h


class Found:
    """Whether the device has found a fault, by a look at three words in pinned memory."""

    def __init__(self) -> None:
        ops = torch.ops.mok_megatron
        self._route = ctypes.c_int32.from_address(ops.route_fault_address())
        self._exchange = ctypes.c_int32.from_address(ops.exchange_fault_address())
        self._stopped = ctypes.c_int32.from_address(ops.stopped_address())

    @property
    def value(self) -> bool:
        return bool(self._route.value or self._exchange.value or self._stopped.value)


@cache
def record() -> Found:
    """Of this process; from now on every optimizer step looks at it too, and a thread and the end
    of the process look whether the device has stopped a launch. Needs the library."""
    found = Found()
    threading.Thread(target=_watch, name="mok-watch", daemon=True).start()
    atexit.register(look_for_stopped)

    def before_step(*_: object) -> None:
        if not torch.cuda.is_current_stream_capturing():
            try:
                torch.cuda.current_stream().synchronize()
            except RuntimeError:
                raise_stopped()  # says more, if it was a launch of ours
                raise
            if found.value:
                raise_found()

    register_optimizer_step_pre_hook(before_step)
    return found


def raise_found() -> None:
    """Raises RuntimeError for the first fault of the choices, or of a call of several ranks, if
    there is one, and forgets it; written down as found in the call made last. Else for a wait that
    was in vain, every time."""
    error = None
    if (words := torch.ops.mok_megatron.take_route_fault())[0]:
        kind, most = "probability" if words[0] == _NOT_FINITE else "choice", words[-1]
        error = _fault(describe(words), kind, words[2] // most if most else None)
    elif (words := torch.ops.mok_megatron.take_exchange_fault())[0]:
        kinds = {_TOKENS: "tokens", _ROWS: "rows"} | dict.fromkeys(_COUNTED, "error")
        kind = kinds.get(words[0], "desync")
        error = _fault(describe_call(words), kind, words[1])
    if error is None:
        raise_stopped()
        return
    if (last := calls.latest()) is not None:
        last.phase = "an earlier call"
        last.failed(error)
    raise error


def raise_stopped() -> None:
    """Raises RuntimeError where a wait of the device was in vain, every time: check.h's words, and
    what the record says."""
    if not look_for_stopped():
        return
    try:
        torch.ops.mok_megatron.check_stopped()
    except RuntimeError as error:
        error.args = (f"{error}{_looked[0]}",)
        vars(error)["mok_record"] = True  # it has its record, and names its call
        raise


def _fault(text: str, kind: str, rank: int | None) -> CallFault:
    return CallFault(text.removeprefix("mok: "), kind, rank)


def _watch() -> None:
    while not look_for_stopped():
        time.sleep(_LOOK_S)


_lock = threading.Lock()
_looked: list[str] = []  # a stopped launch has been written down: what of it


def look_for_stopped() -> bool:
    """Whether the device has stopped a launch, since a wait of its own took too long or a table was
    wrong. Written down the first time: the process may hear of it from torch alone, or never, where
    it is waiting for the device when its launcher ends it."""
    with _lock:
        if not _looked and stopped()[0]:
            _looked.append("")
            time.sleep(_SETTLE_S)  # the tag is written first
            _looked[0] = _write_stopped(stopped(), _why_stopped())
        return bool(_looked)


def stopped() -> list[int]:
    """tag, CTA, thread, value and expected of check.h's Fault; tag 0: nothing was stopped."""
    return list(torch.ops.mok_megatron.stopped())


def _why_stopped() -> str:
    try:
        torch.ops.mok_megatron.check_stopped()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def _write_stopped(words: Sequence[int], text: str) -> str:
    """The record, in a line."""
    last = calls.latest()
    if last is None:
        return ""
    tag, _, thread, seen, epoch = words
    between = tag in (_START, _COMBINE_HOME, _ABORTED)
    last.phase = text.partition("launch failed: ")[2].partition(" (CTA")[0]
    last.of_epoch(epoch if between else 0)
    counter, expected = "epoch of the call", epoch if between else None
    if tag == _ABORTED:  # what the rank that stopped first has waited for
        counter, expected = f"abort of rank {last.place.ranks[seen >> 12 & 0xFFF]}", 0
        tag, thread, seen = seen >> 24, seen & 0xFFF, 1
    blamed = [thread] if tag == _START else [] if between else [last.place.own]
    record = replace(
        last.record("wait" if between else "error", text, blamed),
        counter=counter if between else "progress of the launch",
        expected=expected,
        seen=seen,
    )
    _, names, why_not = last.write_wait(record)
    return _in_words(record, names, why_not)


def _in_words(record: Record, names: str, why_not: str | None) -> str:
    where = (
        f"call {record.call} (layer {record.layer}, {record.direction})"
        if record.call
        else "a call that is not known"
    )
    wanted = "not known" if record.expected is None else record.expected
    where_kept = (
        f"recorded for {MERGE} {directory()}" if why_not is None else f"no record: {why_not}"
    )
    return (
        f"\nmok: found on rank {record.rank} in {where}, where {record.phase}: {record.counter}, "
        f"expected {wanted}, got {record.seen}; look into the log of {names or 'each rank'} first; "
        f"{where_kept}"
    )


def describe(words: Sequence[int]) -> str:
    """The words of a fault: kind, expert, token, slot, E and K of the call, bits of the
    probability, and the most tokens of a rank where there are several: tokens count on then."""
    kind, expert, token, slot, experts, choices, bits, most = words
    rank = f", on expert parallel rank {token // most}" if most else ""
    token = token % most if most else token
    where = f"at token {token}, slot {slot}{rank}, in an earlier call on this GPU"
    remedy = "make the ids with mok_megatron.function.top_k_choices"
    if kind == _NOT_FINITE:
        (prob,) = struct.unpack("<f", bits.to_bytes(4, "little"))
        text = not_finite(prob, where)
    elif kind == _DUPLICATE:
        text = (
            f"a token may choose an expert only once, got expert {expert} again {where}; {remedy}"
        )
    elif expert == OVERFULL:
        text = (
            f"a token may choose at most {choices} experts, got more routes {where}; "
            "set --moe-router-topk to what the router really chooses"
        )
    else:
        text = f"an expert id must be -1 or in [0, {experts}), got {expert} {where}; {remedy}"
    return f"mok: {text}. That call's results are NaN"


def describe_call(words: Sequence[int]) -> str:
    """The words of a fault of several ranks, the same on all, or of what this one has counted:
    kind, rank, its value, what it should be, and the rows of a rank when all have as many."""
    kind, rank, value, wanted, balanced = words
    where = f"on expert parallel rank {rank}, in an earlier call on this GPU"
    if kind == _TOKENS and value < 0:
        text = (
            "every expert parallel rank must make a call whose arguments keep the rules, got one "
            f"that did not {where}; the error it has raised says why"
        )
    elif kind == _TOKENS:
        text = (
            f"a rank may bring at most {wanted} tokens, got {value} {where}; "
            f"set --mok-max-tokens to {value} or more"
        )
    elif kind == _ROWS:
        text = (
            f"the rows of an expert must fit the buffers of its rank, of {wanted} rows, got "
            f"{value} with padding {where}; set --mok-row-budget to "
            f"{math.ceil(100 * value / balanced) / 100} or more, or balance the router's load"
        )
    elif kind in _COUNTED:
        text = (
            "every row that is sent must be received and combined once, got "
            f"{value} {_COUNTED[kind]} for {wanted} {where}; a kernel or this GPU's memory has "
            "failed: go on from the last checkpoint, on another GPU if it comes again "
            "(python -m mok_megatron.doctor)"
        )
    else:
        field, names = _FIELDS[kind]
        text = (
            "all expert parallel ranks must make the same calls in the same order, got "
            f"{field} {names.get(value, value)} {where}, and {names.get(wanted, wanted)} on the "
            "others; look for a rank that skips a layer or a microbatch, or runs with other flags "
            "or another version"
        )
    return f"mok: {text}. That call's results are NaN"


def out_of_memory(error: RuntimeError, direction: str, x_TH: Tensor) -> RuntimeError:
    """The error of an op; when it found no room for a buffer, with what there is and what to do.

    x_TH [T, H]: the call's tokens.
    """
    found = _NO_ROOM.search(str(error))
    if found is None:
        return error
    wanted = int(found[1])
    free, total = torch.cuda.mem_get_info(x_TH.device)
    cached = torch.cuda.memory_reserved(x_TH.device) - torch.cuda.memory_allocated(x_TH.device)
    return torch.OutOfMemoryError(
        f"mok: the buffers of a {direction} of {len(x_TH)} tokens must fit in memory, got "
        f"{_gib(free)} free of {_gib(total)}, and {_gib(cached)} in pieces in torch's cache, for a "
        f"buffer of {_gib(wanted)} ({wanted} bytes); lower --micro-batch-size, keep less with "
        "--recompute-granularity selective --recompute-modules moe, or set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. The call has changed nothing"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
