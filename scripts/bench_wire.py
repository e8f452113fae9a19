"""Communication between ranks that a layer does not hide, on one GPU with a throttled wire.

    python scripts/bench_wire.py --build                 the library with the wire: nvcc, no GPU
    python scripts/bench_wire.py [--models deepseek-v3,...] [--ranks 4,8] [--rates 450,360,250]

This is emulation. All ranks of a group are launches of one process on one GPU (virtual ranks), each
with an equal share of the SMs. They run the kernels and the protocol of real ranks, and what one
copies from or to another's memory is held back as if each rank had a way in and a way out of
B x (its SMs / all SMs), B in GB/s (csrc/device/wire.cuh). So a rank has the wire for its compute
that a whole GPU would have for its own. It shows what the kernels hide behind products; it does not
show the latency of a fabric, its congestion, or its protocol's overhead, and all ranks share one L2
and one memory.

    exposed = (throttled - unthrottled) / unthrottled

of forward + backward, medians over rounds of ratios inside a round: the same library, tensors and
routing (random, so that rows are close to balanced), the rate alone differs. Each direction is also
set against the longer of its unthrottled time and its wire's: bytes of the busiest way over its
rate. Every throttled y, dx and dprob must have the bytes of the unthrottled ones, and no time may
be shorter than its wire's, before anything is printed. Weight gradients are added into fp32.

A table on the terminal, a JSON line a measurement, and a picture. Exit codes: 0 done, 1 a result
was wrong, 2 wrong input.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Before CUDA starts: ranks' launches must not queue up behind one another's.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bench_record  # noqa: E402
from bench import OneLineParser  # noqa: E402
from bench_wire_report import WireError, plot, summarise, table, way_bytes  # noqa: E402
from library_variant import build  # noqa: E402
from tqdm import tqdm  # noqa: E402

LIBRARY = ROOT / "build" / "wire" / "_C.abi3.so"
RESULTS = ROOT / "scripts" / "results"
MODELS = {
    "deepseek-v3": "deepseek-v3/32",
    "qwen3-235b": "qwen3-235b/16",
    "qwen3-30b": "qwen3-30b/16",
}


def measure(options: argparse.Namespace) -> int:
    """Runs what the options ask for."""
    from bench_problem import PRESETS, WHOLE
    from bench_wire_ranks import VirtualRanks, need_wire

    need_wire(options.library)
    about = bench_record.environment("cuda", options.commit)
    lines = []
    cases = [(model, ranks) for model in options.models for ranks in options.ranks]
    every = [0.0, *options.rates]
    with tqdm(total=len(cases) * options.rounds * len(every), disable=None) as bar:
        for model, ranks in cases:
            bar.set_description(f"{model}, {ranks} ranks")
            shape = PRESETS[MODELS[model]]
            group = VirtualRanks.of(shape, WHOLE[model], ranks, options.seed, options.library)
            way = way_bytes(group.rows_PP(), shape.hidden, shape.rows)
            samples = group.interleaved(every, options.rounds, bar.update)
            base, rates = summarise(samples, way, group.share)
            del group
            lines.append(
                about
                | {"what": "exposed communication, emulated wire", "model": model, "ranks": ranks}
                | {"tokens": shape.tokens, "experts": WHOLE[model], "rounds": options.rounds}
                | {"forward_ms": base.forward, "backward_ms": base.backward, "rates": rates}
            )
            with bar.external_write_mode():
                print("\n".join(table(lines[-1:])), flush=True)
            bench_record.append(options.output, lines[-1])
    print("\n".join(["", "emulation: virtual ranks on one GPU, a throttled wire", *table(lines)]))
    if said := plot(options.picture, lines):
        print(said)
    return 0


def main(tokens: list[str]) -> int:
    parser = OneLineParser(
        prog="bench_wire.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def names(text: str) -> list[str]:
        return [part.strip() for part in text.split(",")]

    parser.add_argument("--build", action="store_true", help="compile --library, and end")
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--models", type=names, default=list(MODELS), metavar="A,B")
    parser.add_argument("--ranks", type=names, default=["4", "8"], metavar="P,P")
    parser.add_argument("--rates", type=names, default=["450", "360", "250"], metavar="B,B")
    parser.add_argument("--rounds", type=int, default=5, help="of the interleaving")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="of this tree, where git cannot tell")
    parser.add_argument("--output", type=Path, default=RESULTS / "wire.jsonl")
    parser.add_argument("--picture", type=Path, default=RESULTS / "wire.png")
    options = parser.parse_args(tokens)
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"mok: a model must be one of {', '.join(MODELS)}, got {min(unknown)!r}")
    for name, kind, least, most in (("ranks", int, 2, 16), ("rates", float, 1, 10_000)):
        try:
            values = [kind(text) for text in getattr(options, name)]
        except ValueError:
            values = []
        if not values or not all(least <= value <= most for value in values):
            got = ",".join(getattr(options, name))
            parser.error(f"mok: --{name} must be numbers of {least} to {most}, got {got!r}")
        setattr(options, name, values)
    if options.rounds < 1:
        parser.error(f"mok: --rounds must be at least 1, got {options.rounds}; leave it out")
    if options.build:
        build(options.library, "MOK_THROTTLED_WIRE")
        return 0
    try:
        return measure(options)
    except WireError as error:
        print(error, file=sys.stderr)
        return 1
    except RuntimeError as error:
        parser.error(str(error))
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
