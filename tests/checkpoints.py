"""Checkpoints (torch_dist) of a tests.tiny_megatron.Training, and what is in them to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import tiny_megatron as tiny

Digests = dict[tuple[str, tuple[int, ...]], str]


def state(training: tiny.Training, *, is_loading: bool = False) -> dict[str, Any]:
    """Megatron's sharded state of model and optimizer, as megatron.training asks for it."""
    metadata = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": training.model.dp_cp_group,
    }
    if training.ddp.get("use_distributed_optimizer"):
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
    model = training.model.module.sharded_state_dict(metadata=metadata)
    optimizer = training.optim.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def save(training: tiny.Training, folder: Path) -> None:
    """Into a folder that is not there yet."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.filesystem_async import (
        get_write_results_queue,
    )

    get_write_results_queue("fork")  # else a new interpreter serves it, which imports torch first
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(state(training), str(folder))


def load(training: tiny.Training, folder: Path) -> None:
    """Weights and optimizer from what `save` wrote."""
    give(training, read(training, folder))


def read(training: tiny.Training, folder: Path) -> dict[str, Any]:
    """What `give` takes."""
    from megatron.core import dist_checkpointing

    return dist_checkpointing.load(state(training, is_loading=True), str(folder))


def give(training: tiny.Training, loaded: dict[str, Any]) -> None:
    """Have the training go on from a loaded state."""
    training.model.module.load_state_dict(loaded["model"])
    training.optim.load_state_dict(loaded["optimizer"])


def with_own_groups(training: tiny.Training, loaded: dict[str, Any]) -> dict[str, Any]:
    """The loaded state with the reader's parameter groups and step around the moments.

    With experts on one rank Megatron has one optimizer, else two, and it refuses the groups of the
    other kind; the tensors have the same keys.
    """
    parts = training.optim.chained_optimizers
    optimizer = loaded["optimizer"]
    for number, part in enumerate(parts):
        whole, own = optimizer if len(parts) == 1 else optimizer[number], part.state_dict()
        # In bf16 the fp32 weights are beside the state and the groups, which are one level lower.
        inner, own_inner = whole.get("optimizer", whole), own.get("optimizer", own)
        inner["param_groups"] = own_inner["param_groups"]
        inner["state"].pop("common_step", None)
        for parameter, moments in inner["state"].items():
            moments |= {k: v for k, v in own_inner["state"][parameter].items() if k == "step"}
    keys = own if len(parts) == 1 else range(len(parts))
    return {"model": loaded["model"], "optimizer": {key: optimizer[key] for key in keys}}


def tensors(training: tiny.Training) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
    """Key, offset and values of every tensor of weights and optimizer state on this rank."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    sharded = state(training)
    apply_factories(sharded)
    for value in nested_values(sharded):
        if isinstance(value, ShardedTensor):
            yield value.key, value.global_offset, value.data


def digests(training: tiny.Training) -> Digests:
    """(key, offset) -> hash of the bytes, over all ranks; copies of a tensor must be equal.

    An expert is always a tensor of its own, so the offsets are the same at every size.
    """
    own: Digests = {}
    for key, offset, tensor in tensors(training):
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        own[key, offset] = hashlib.sha256(content).hexdigest()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    union: Digests = {}
    for of_rank in gathered:
        for place, digest in of_rank.items():
            assert union.setdefault(place, digest) == digest, place
    return union


def spoil(training: tiny.Training) -> None:
    """NaN in every weight, moment and bias: what a load forgets is seen."""
    with torch.no_grad():
        for _, _, tensor in tensors(training):
            tensor.fill_(float("nan"))
