"""python -m mok_megatron.plan CONFIG: what its MoE layers will cost on so many GPUs.

Exit codes: 0 done, 2 wrong input, 130 Ctrl-C, 141 nobody reads on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mok_megatron import __version__
from mok_megatron.plan import chart
from mok_megatron.plan.estimate import (
    DIRECTIONS,
    Direction,
    Step,
    direction,
    layer_of,
    size_of_group,
    step,
)
from mok_megatron.plan.layer import BUDGET, Layer
from mok_megatron.plan.machines import (
    EXPOSED_SHARE,
    LINK_SHARE,
    MACHINES,
    NETWORK_SHARE,
    RATES,
    RATES_SOURCE,
    REST_TIMES,
    ROWS,
    ROWS_SOURCE,
    Machine,
)
from mok_megatron.plan.model import Model, PlanError, read, state_bytes
from mok_megatron.plan.training import Iteration, Unformed, iteration

RANKS = (1, 8, 64, 72)
RUNS = (8, 64, 512, 4096)
SHARES = {
    "link share": LINK_SHARE,
    "network share": NETWORK_SHARE,
    "exposed, most": EXPOSED_SHARE,
    "rest, most": REST_TIMES,
}
CAVEAT = """\
A model, not a measurement: products, layers and an emulated wire were measured on one H200, nothing
on several GPUs, and nothing on another machine. There is no kernel for Blackwell yet."""
_EPILOG = f"""\
{CAVEAT}

floor     what no kernel can beat: the largest of FLOPs, memory bytes and NVLink bytes, each over
          its rate
expected  at what this project's products and layers reached; communication overlaps but for its
          ends
exposed   what communication adds to that: when all but the ends overlaps .. when as much stays as
          with an emulated wire at most; of a rank with the mean number of rows. The busiest rank
          sets the time: multiply by its rows over the mean
step      one micro-batch through the whole model, forward and backward; what is not an MoE layer
          runs at the rate of a large matrix product, which it does not reach: real steps are longer
iteration all micro-batches of a global batch, the pipeline's bubble, what stays exposed of reducing
          gradients (fp32) and gathering parameters (bf16), and the optimizer: all but the ends
          overlaps and the rest of a layer runs at a matrix product's rate .. no reduction overlaps
          and the rest takes as long as in the slower of two measured steps

EP is the most ranks that can share the experts evenly, divide the ranks of a pipeline stage, and
lie in one NVLink domain; DP counts all ranks of a stage. Arguments of Megatron that a plan depends
on replace the file's, for example --micro-batch-size 2 or --pipeline-model-parallel-size 8.
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the plan: a number of ranks of a machine."""

    machine: Machine
    ranks: int
    layer: Layer
    forward: Direction
    backward: Direction
    step: Step

    @property
    def exposed(self) -> tuple[float, float]:
        """Parts of the compute of both directions that communication adds, best and worst."""
        both = self.forward, self.backward
        compute = sum(each.compute for each in both)
        best, worst = sum(each.best for each in both), sum(each.worst for each in both)
        return best / compute - 1, worst / compute - 1


def main(arguments: list[str] | None = None) -> int:
    """The command; `arguments` default to the command line's. Returns the exit code."""
    options, rest = _parser().parse_known_args(arguments)
    machines = [MACHINES[name] for name in options.machines]
    try:
        model = read(options.config, _overrides(rest))
        rows = plan(model, machines, options.ranks or list(RANKS))
        runs = iterations(model, machines, options.ranks or RUNS)
        if options.png is not None:
            chart.draw(options.png, model, machines, runs, CAVEAT)
    except PlanError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(as_json(model, rows, runs)) if options.json else render(model, rows, runs))
    if options.png is not None:
        print(
            f"step time against expert parallel size, and what an iteration is made of, is in "
            f"{options.png}",
            file=sys.stderr,
        )
    return 0


def plan(model: Model, machines: list[Machine], ranks: list[int]) -> list[Row]:
    rows = []
    for machine in machines:
        for count in ranks:
            layer = layer_of(model, size_of_group(model, count, machine))
            forward, backward = (direction(layer, machine, name) for name in DIRECTIONS)
            rows.append(
                Row(
                    machine=machine,
                    ranks=count,
                    layer=layer,
                    forward=forward,
                    backward=backward,
                    step=step(model, machine, layer.ranks),
                )
            )
    return rows


def iterations(
    model: Model, machines: list[Machine], ranks: Sequence[int]
) -> dict[tuple[str, int], Iteration | str]:
    """By machine and ranks: an iteration, or in words why so many ranks cannot run it."""
    found: dict[tuple[str, int], Iteration | str] = {}
    for machine in machines:
        for count in ranks:
            try:
                found[machine.name, count] = iteration(model, machine, count)
            except Unformed as why:
                found[machine.name, count] = str(why)
    return found


def memory(model: Model, rows: list[Row]) -> list[dict[str, Any]]:
    """Bytes of a rank for each (ranks, EP) of the rows.

    state: weights, gradients and optimizer of the fullest rank with the file's pipeline, None where
    so many ranks cannot form it. fits: machines with room for state and workspace.
    """
    found: dict[tuple[int, int], dict[str, Any]] = {}
    counts = model.ranks_of_pipeline()
    for row in rows:
        ranks, ep, workspace = row.ranks, row.layer.ranks, row.layer.workspace_bytes()
        state = None
        if ranks % (model.pipeline * ep) == 0:
            state = max(state_bytes(count, ranks, model.pipeline, ep) for count in counts)
        about = found.setdefault(
            (ranks, ep),
            {
                "ranks": ranks,
                "expert_parallel": ep,
                "workspace": workspace,
                "context_of_a_layer": row.layer.context_bytes(),
                "usual_context_of_a_layer": row.layer.usual_context_bytes(),
                "state": state,
                "fits": [],
            },
        )
        if state is not None and state + workspace < row.machine.capacity.value * 1e9:
            about["fits"].append(row.machine.name)
    return [found[key] for key in sorted(found)]


def as_json(
    model: Model, rows: list[Row], runs: dict[tuple[str, int], Iteration | str]
) -> dict[str, Any]:
    machines = {row.machine.name: row.machine for row in rows}
    return {
        "mok_megatron": __version__,
        "caveat": CAVEAT,
        "model": dataclasses.asdict(model)
        | {
            "parameters": model.main().total,
            "mtp_parameters": model.mtp_layers * model.mtp().total,
            "shared_table_parameters": model.tables(),
        },
        "rows": [
            {
                "machine": row.machine.name,
                "ranks": row.ranks,
                "expert_parallel": row.layer.ranks,
                "rows_per_expert": row.layer.rows_per_expert,
                "flops": [row.layer.forward_flops(), row.layer.backward_flops()],
                "memory_bytes": [row.layer.forward_bytes(), row.layer.backward_bytes()],
                "nvlink_bytes": [row.layer.forward_wire_bytes(), row.layer.backward_wire_bytes()],
                "transfer_bytes": row.layer.transfer_bytes(),
                "transfer_bytes_once_a_rank": row.layer.transfer_bytes_once(),
                "forward_ms": dataclasses.asdict(row.forward),
                "backward_ms": dataclasses.asdict(row.backward),
                "exposed": row.exposed,
                "step_ms": dataclasses.asdict(row.step),
            }
            for row in rows
        ],
        "memory_bytes": memory(model, rows),
        "iterations": [
            {"machine": machine, "ranks": ranks}
            | ({"impossible": run} if isinstance(run, str) else dataclasses.asdict(run))
            for (machine, ranks), run in runs.items()
        ],
        "inputs": {
            "rates_tflops": {"value": RATES, "kind": "measured", "source": RATES_SOURCE},
            "rows_ms_a_gb": {"value": ROWS, "kind": "measured", "source": ROWS_SOURCE},
            **{
                name.replace(", ", "_").replace(" ", "_"): dataclasses.asdict(share)
                for name, share in SHARES.items()
            },
            **{name: dataclasses.asdict(machine) for name, machine in machines.items()},
        },
    }


def render(model: Model, rows: list[Row], runs: dict[tuple[str, int], Iteration | str]) -> str:
    """The plan for a terminal: the model, a table of times, one of memory, one of whole runs, one
    of inputs."""
    parameters = f"{model.main().total / 1e9:.4g} billion parameters"
    layers = f"{sum(model.is_moe)} MoE layers"
    if model.mtp_layers:
        own = model.mtp_layers * model.mtp().total
        parameters += (
            f"; MTP adds {own / 1e9:.4g}\n(published counts add the embedding and output that it "
            f"shares: {(own + model.tables()) / 1e9:.4g})"
        )
        layers += f" and {model.mtp_layers} of MTP"
    shared = f", a shared expert of {model.shared_ffn}" if model.shared_ffn else ""
    head = f"""\
{model.name}: {parameters};
{layers} of {model.num_experts} experts, {model.top_k} a token;
hidden {model.hidden}, expert width {model.ffn}{shared};
{model.tokens} tokens a micro-batch on each rank
{CAVEAT}

One MoE layer on one rank (ms), and a step (ms); forward / backward"""
    names = "machine,ranks,EP,rows an expert,TFLOP,floor,bound by,NVLink MB,expected,exposed,"
    times = [tuple((names + "step >=,tokens/s/GPU <=").split(",")), *map(_cells, rows)]
    names = "ranks,EP,workspace,context of a layer,Megatron's usual,state,fits (no activations yet)"
    memories = [tuple(names.split(","))]
    memories += [
        (
            str(m["ranks"]),
            str(m["expert_parallel"]),
            *(
                _gb(m[key])
                for key in ("workspace", "context_of_a_layer", "usual_context_of_a_layer", "state")
            ),
            ", ".join(m["fits"]) or "-",
        )
        for m in memory(model, rows)
    ]
    every = {
        f"{machine.name} {key}": value
        for machine in {row.machine.name: row.machine for row in rows}.values()
        for key, value in machine.inputs().items()
    }
    inputs = [("input", "value", "", "kind", "source")]
    inputs += [
        (name, f"{i.value:.4g}", i.unit, i.kind, i.source) for name, i in (every | SHARES).items()
    ]
    inputs.append(("rates of passes", _span(), "TFLOP/s", "measured", RATES_SOURCE))
    batch = f"{model.batch} sequences" if model.batch else "one micro-batch a rank"
    cost = f"{ROWS['forward']}, {ROWS['backward']}"
    inputs.append(("cost of rows", cost, "ms a GB", "measured", ROWS_SOURCE))
    return "\n".join(
        [
            head,
            *_aligned(times, left=(0, 6)),
            "",
            f"Memory of a rank, GB; row buffers hold {BUDGET:g} x the balanced rows (EP 1: all)",
            "state: weights, gradients, optimizer of the fullest rank, in a pipeline of "
            f"{model.pipeline};",
            "-: so many ranks cannot form it, try --pipeline-model-parallel-size",
            *_aligned(memories, left=(6,)),
            "",
            f"An iteration of the whole run (ms), {batch}; exposed: of reduce and gather, at best;",
            "-: so many ranks cannot run it, try --pipeline-model-parallel-size or "
            "--global-batch-size",
            *_aligned(_runs(runs), left=(0, 13)),
            "",
            *_aligned(inputs, left=(0, 2, 3, 4)),
        ]
    )


def _runs(runs: dict[tuple[str, int], Iteration | str]) -> list[tuple[str, ...]]:
    names = "machine,ranks,PP,EP,DP,micro-batches,compute,bubble,reduce,gather,exposed,optimizer,"
    table = [tuple((names + "iteration,tokens/s/GPU <=").split(","))]
    for (machine, ranks), run in runs.items():
        if isinstance(run, str):
            table.append((machine, str(ranks), *11 * "-", run))
            continue
        sizes = run.pipeline, run.expert_parallel, run.data_parallel, run.micro_batches
        times = run.compute, run.bubble, run.reduce, run.gather, run.exposed, run.optimizer
        cells = [str(ranks), *map(str, sizes), *(f"{each:.0f}" for each in times)]
        both = f"{run.best:.0f} .. {run.worst:.0f}"
        table.append((machine, *cells, both, f"{run.tokens_per_s:.0f}"))
    return table


def _cells(row: Row) -> tuple[str, ...]:
    forward, backward, layer = row.forward, row.backward, row.layer
    best, worst = row.exposed
    alone = layer.ranks == 1
    return (
        row.machine.name,
        f"{row.ranks}",
        f"{layer.ranks}",
        f"{layer.rows_per_expert:.0f}",
        f"{layer.forward_flops() / 1e12:.2f} / {layer.backward_flops() / 1e12:.2f}",
        f"{forward.floor:.2f} / {backward.floor:.2f}",
        f"{forward.bound} / {backward.bound}",
        f"{layer.forward_wire_bytes() / 1e6:.0f} / {layer.backward_wire_bytes() / 1e6:.0f}",
        f"{forward.best:.2f} / {backward.best:.2f}",
        "-" if alone else f"{best:.1%} .. {worst:.1%}",
        f"{row.step.best:.0f}",
        f"{row.step.tokens_per_s:.0f}",
    )


def _aligned(table: Sequence[tuple[str, ...]], left: tuple[int, ...] = ()) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in table
    ]


def _gb(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / 1e9:.2f}" if count < 1e11 else f"{count / 1e9:.0f}"


def _span() -> str:
    every = [value for rates in RATES.values() for value in rates.values()]
    return f"{min(every)}-{max(every)}"


def _overrides(tokens: list[str]) -> dict[str, Any]:
    """`--key value` and `--key=value`; a flag alone is true."""
    found: dict[str, Any] = {}
    key = None
    for token in tokens:
        if token.startswith("--"):
            key, equals, value = token[2:].partition("=")
            found[key] = value if equals else True
        elif key is None or found[key] is not True:
            raise PlanError(f"mok: an override must be --KEY VALUE, got {token!r}; see --help")
        else:
            found[key] = token
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mok_megatron.plan",
        usage="%(prog)s CONFIG [option ...] [--ARGUMENT VALUE ...]",
        description="What the MoE layers of a config file will cost: FLOPs, bytes, memory, time.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, help="a YAML file, see configs/")
    parser.add_argument(
        "--ranks",
        type=_counts,
        metavar="N,N",
        help=f"numbers of GPUs (default: {','.join(map(str, RANKS))}; of whole runs "
        f"{','.join(map(str, RUNS))})",
    )
    parser.add_argument(
        "--machines",
        type=_machines,
        default=list(MACHINES),
        metavar="M,M",
        help=f"some of {', '.join(MACHINES)} (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="draw step time against expert parallel size, and what an iteration is made of",
    )
    return parser


def _counts(text: str) -> list[int]:
    counts = [int(part) if part.isdigit() else 0 for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"must be numbers above 0 with commas, got {text!r}")
    return counts


def _machines(text: str) -> list[str]:
    names = text.lower().split(",")
    for name in names:
        if name not in MACHINES:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(MACHINES)}, got {name!r}")
    return names


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head` has seen enough; the interpreter would complain at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
