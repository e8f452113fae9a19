"""GPUs in numbers, each with where it comes from.

measured    on one NVIDIA H200; the source says how
datasheet   NVIDIA's published figure, dense
derived     a datasheet figure times the part of it that the H200 reached
assumed     nobody measured it; the source says why this value

No measured figure here involves two GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

# TFLOP/s of this project's grouped products on one H200, balanced rows, by pass and rows of an
# expert: the median over the shapes of scripts/results/passes.jsonl (a test compares them).
RATES: dict[str, dict[int, int]] = {
    "up": {512: 607, 1024: 672, 2048: 683, 4096: 656},
    "down": {512: 605, 1024: 702, 2048: 691, 4096: 673},
    "down_grad": {512: 479, 1024: 631, 2048: 633, 4096: 529},
    "up_grad": {512: 651, 1024: 673, 2048: 684, 4096: 709},
    "w1+32": {512: 400, 1024: 578, 2048: 681, 4096: 703},
    "w2+32": {512: 378, 1024: 603, 2048: 675, 4096: 665},
}
RATES_SOURCE = "scripts/results/passes.jsonl: one H200, balanced rows, medians by rows an expert"
# What a whole layer takes above its products at these rates, for each byte of its routed rows
# (2·N·H): rows brought, combined and waited for. Milliseconds a GB, by direction; with them the
# layers of LAYERS_COMMIT in scripts/results/layer.jsonl come out within 8 % (a test compares them).
ROWS = {"forward": 1.95, "backward": 2.3}
LAYERS_COMMIT = "2811912"
ROWS_SOURCE = f"scripts/results/layer.jsonl: one H200, eight layers of {LAYERS_COMMIT}, within 8 %"


@dataclass(frozen=True, kw_only=True)
class Input:
    """A number of the model; `kind` is one of the four of this file's head."""

    value: float
    unit: str
    kind: str
    source: str


LINK_SHARE = Input(
    value=0.8, unit="of the link", kind="assumed", source="rows of a few KB; no link was measured"
)
NETWORK_SHARE = Input(
    value=0.8, unit="of the network", kind="assumed", source="large messages; none was measured"
)
REST_TIMES = Input(
    value=3.3,
    unit="x the floor",
    kind="measured",
    source="scripts/results/throughput.jsonl: two steps on one H200, less MoE layers and optimizer "
    "as they are here, took 2.1 and 3.3 times as long as at the matrix rate",
)
# Of a direction's wire time, or of its products' where those are shorter, the most that was not
# hidden: what is "worst" here. A test compares it with the medians of WIRE_COMMIT.
WIRE_COMMIT = "94573e6"
EXPOSED_SHARE = Input(
    value=0.22,
    unit="of the shorter",
    kind="measured",
    source="scripts/results/wire.jsonl: a wire of 360 GB/s emulated on one H200, three models at "
    f"EP 4 and 8, the largest of {WIRE_COMMIT}",
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU and the NVLink domain around it. `link`: one direction. `domain`: GPUs that reach each
    other's memory over NVLink, the limit of expert parallelism here. `network`: one direction, of a
    GPU's own card."""

    name: str
    matrix: Input
    memory: Input
    link: Input
    network: Input
    capacity: Input
    domain: Input
    processors: Input

    def inputs(self) -> dict[str, Input]:
        return {key: value for key, value in vars(self).items() if isinstance(value, Input)}


_BF16, _HBM = 989.0, 4.8  # H200: datasheet, what the measured figures are parts of
_H200_MATRIX = Input(
    value=790,
    unit="TFLOP/s",
    kind="measured",
    source="cuBLAS bf16 8192 x 8192 x 8192 on random data, 769 to 798; dense products in "
    "scripts/results/passes.jsonl: up to 800",
)
_H200_MEMORY = Input(
    value=4.3,
    unit="TB/s",
    kind="measured",
    source="reading and writing memory; in-place adds in scripts/results/passes.jsonl: up to 4.23",
)


def _sheet(value: float, unit: str, source: str) -> Input:
    return Input(value=value, unit=unit, kind="datasheet", source=source)


def _derived(sheet: float, measured: Input, of: float) -> Input:
    return Input(
        value=sheet * measured.value / of,
        unit=measured.unit,
        kind="derived",
        source=f"datasheet {sheet:g} x {measured.value:g} / {of:g}, the part that one H200 reached",
    )


def _machine(
    name: str,
    sheet: str,
    *,
    capacity: float,
    bf16: float = _BF16,
    hbm: float = _HBM,
    link: float = 450,
    network: float = 50,
    domain: float = 8,
    processors: float = 132,
) -> Machine:
    """TFLOP/s, TB/s, GB/s and GB of a datasheet; Hopper's where not given."""
    own = name == "H200"
    return Machine(
        name=name,
        matrix=_H200_MATRIX if own else _derived(bf16, _H200_MATRIX, _BF16),
        memory=_H200_MEMORY if own else _derived(hbm, _H200_MEMORY, _HBM),
        link=_sheet(link, "GB/s", f"{sheet}: NVLink, one direction"),
        network=_sheet(
            network, "GB/s", f"{sheet}: a card of {8 * network:g} Gb/s a GPU, one direction"
        ),
        capacity=_sheet(capacity, "GB", sheet),
        domain=_sheet(domain, "GPUs", f"{sheet}: one NVLink domain"),
        processors=Input(
            value=processors,
            unit="SMs",
            kind="datasheet" if bf16 == _BF16 else "assumed",
            source=sheet if bf16 == _BF16 else "B200's; only the ends of overlap depend on it",
        ),
    )


_BLACKWELL = {"bf16": 2500.0, "hbm": 8.0, "link": 900.0, "domain": 72.0, "processors": 148.0}
MACHINES = {
    machine.name.lower(): machine
    for machine in (
        _machine("H100", "H100 SXM", hbm=3.35, capacity=80),
        _machine("H200", "H200 SXM", capacity=141),
        _machine("GB200", "GB200 NVL72", **_BLACKWELL, capacity=186),
        _machine("GB300", "GB300 NVL72", **_BLACKWELL, network=100, capacity=288),
    )
}
