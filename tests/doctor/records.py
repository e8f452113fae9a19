"""A record that every test can change."""

from __future__ import annotations

from mok_megatron.records import Record

RECORD = Record(
    kind="collective",
    message="mok: all ranks must take part, got no end; look",
    backend="reference",
    run="5eed",
    job="torchrun none",
    rank=0,
    world=4,
    group=[0, 1, 2, 3],
    layer=3,
    direction="backward",
    phase="dispatch",
    call=1234,
    completed=1233,
    tokens=4096,
    counter="ranks that took part",
    expected=4,
    seen=3,
    blamed=[],
    peers={},
    waited_s=60.0,
    time=1_700_000_000.0,
    host="node7",
    pid=4711,
    device="cpu",
    versions={"torch": "2.11.0"},
    stack=["train.py:1 <module>"],
)
