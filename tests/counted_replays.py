"""mok_megatron.launch, saying at its end how often a CUDA graph was replayed."""

from __future__ import annotations

import atexit
from collections import Counter
from typing import Any

import torch

from mok_megatron import launch

MARK = "graph replays: "


def _count_replays() -> None:
    calls: Counter[str] = Counter()
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: Any) -> None:
        calls["replay"] += 1
        replay(graph)

    torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign]
    atexit.register(lambda: print(f"{MARK}{calls['replay']}", flush=True))


if __name__ == "__main__":
    _count_replays()
    launch.main()
