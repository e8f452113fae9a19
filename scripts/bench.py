"""What a GPU does with this repository's kernels, beside what else it could run.

    python scripts/bench.py --layer [--quick]                      one MoE layer beside its peers
    python scripts/bench.py --layer --presets qwen3-30b/128 --loads balanced,zipf,hot,empty
    python scripts/bench.py --layer --shape 4096,8,32,7168,2048,0 --tokens 1024,4096,16384
    python scripts/bench.py --passes [--shapes dsv3_32,...] [--only up,...] [--routing balanced,...]

--layer   forward and backward of a whole layer after its router: mok, torch's grouped_mm with a
          permute, Megatron's alltoall with both grouped products of Transformer Engine, SonicMoE,
          and a bound; bench_layer.py and the heads of the files it imports say how. A table on the
          terminal, a JSON line a measurement in scripts/results/layer.jsonl, and layer.png.
--passes  each grouped product beside dense cuBLAS; bench_passes.py.

Only ratios inside one run count: the chip is power-limited. Exit codes: 0 done, 1 an arm was wrong
or broke, 2 wrong input, 3 stopped by --limit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

WRONG_INPUT = 2


class OneLineParser(argparse.ArgumentParser):
    """Its errors are one line, without the usage."""

    def error(self, message: str) -> Any:
        line = message if message.startswith("mok: ") else f"mok: {message}; see --help"
        self.exit(WRONG_INPUT, f"{line}\n")


def main(tokens: list[str]) -> int:
    import bench_layer
    import bench_passes
    from bench_problem import BenchError

    parser = OneLineParser(
        prog="bench.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--layer", action="store_true", help="time a whole layer")
    parser.add_argument("--passes", action="store_true", help="time the grouped products")
    parser.add_argument("--rounds", type=int, help="of the interleaving")
    parser.add_argument("--milliseconds", type=float, help="of each visit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="append JSON lines here")
    bench_layer.add_arguments(parser)
    bench_passes.add_arguments(parser)
    options = parser.parse_args(tokens)
    if options.layer == options.passes:
        got = "both" if options.layer else "neither"
        parser.error(f"mok: one of --layer and --passes must be given, got {got}; see --help")
    for name in ("rounds", "milliseconds"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            parser.error(f"mok: --{name} must be above 0, got {value}; leave it out")
    try:
        if options.layer:
            return bench_layer.measure_layers(options)
        return bench_passes.measure_passes(options)
    except BenchError as error:
        parser.error(str(error))
    return WRONG_INPUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
