"""mok_megatron.launch, printing what the mok layers give TensorBoard, which need not be installed.

A line for each time that they are asked: whether a graph of whole iterations was captured by then,
and the scalars.
"""

from __future__ import annotations

import json

from megatron.core.full_cuda_graph import FullCudaGraphWrapper

from mok_megatron import launch, observe

MARK = "rows: "
_gather = observe.gather


def _printed() -> dict[str, float]:
    scalars = _gather()
    captured = FullCudaGraphWrapper.cuda_graph["training"] is not None
    print(f"{MARK}{json.dumps([captured, scalars])}", flush=True)
    return scalars


if __name__ == "__main__":
    observe.gather = _printed
    launch.main()
