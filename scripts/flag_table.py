"""Megatron's flags under mok, each with the tests that back it.

    python scripts/flag_table.py            a table in Markdown
    python scripts/flag_table.py --json     JSON lines: flags, verdict, why, tests

A row is one of tests/config_rows.py, where Megatron and the rules of mok_megatron/config.py accept
or refuse it; refusals by the same rule are one row. Listed by hand is only which runs back a row:
`works` has one that was compared with alltoall (a graph with mok's eager run), `accepted` is known
to be a valid configuration that changes nothing behind the router. A flag is what Megatron's own
parser calls a field; a field without one has its own name.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mok_megatron.config import ARGUMENT_RULES, RULES


@cache
def _cases() -> Any:
    """tests/config_rows.py, which imports Megatron."""
    return importlib.import_module("tests.config_rows")


# Tests that compare a run with alltoall, `graph` with an eager run that `launch` compares so; those
# with {} have an id for each case, those of a *_cuda.py need a GPU.
COMPARED = {
    "layer": "tests/test_layer.py::test_fp32_has_alltoalls_bytes[ep2]",
    "training": "tests/test_training.py::test_training_equals_alltoall_ep2",
    "gradients": "tests/test_gradients.py::test_training_equals_alltoall[{}]",
    "parallelism": "tests/test_parallelism.py::test_training_equals_alltoall[{}]",
    "data": "tests/test_data_shapes.py::test_every_shape_has_alltoalls_bytes",
    "gather": "tests/test_training.py::test_skipping_the_parameter_gather_would_be_seen",
    "checkpoints": "tests/test_checkpoints.py::test_every_reader_has_every_writers_bytes",
    "sharded": "tests/test_checkpoints_sharded.py::test_every_reader_has_every_writers_bytes",
    "engine": "tests/test_engine_cuda.py::test_training_equals_alltoall[{}]",
    "launch": (
        "tests/test_launches_cuda.py::test_an_unmodified_launch_trains_saves_and_resumes[{}]"
    ),
    "graph": "tests/test_launches_cuda.py::test_a_graph_of_iterations_prints_the_eager_digits",
}
# Row of config_rows.WORKS -> the runs that have it: a key of COMPARED and a case there.
RUNS: dict[str, tuple[tuple[str, str], ...]] = {
    "plain": (("layer", "qwen3"), ("training", "qwen3")),
    "top1": (("layer", "top-1"),),
    "every-expert": (("layer", "every-expert"),),
    "global-aux-loss": (("layer", "global-aux-loss"),),
    "two-aux-losses": (("layer", "two-aux-losses"),),
    "sinkhorn": (("layer", "sinkhorn"),),
    "no-balancing": (("layer", "no-balancing"),),
    "jitter": (("layer", "jitter"),),
    "forced-balance": (("layer", "forced-balance"),),
    "router-replay": (("data", "replayed"),),
    "variable-sequence-lengths": (("parallelism", "pp2-lengths"),),
    "capacity-drops-by-position": (("layer", "drops-by-position"),),
    "shared-expert-overlap": (("layer", "shared-overlap"), ("layer", "shared-gate-overlap")),
    "aux-loss": (("training", "qwen3"),),
    "seq-aux-loss": (("training", "deepseek-v3"),),
    "z-loss": (("training", "qwen3"),),
    "sigmoid": (("training", "deepseek-v3"),),
    "expert-bias": (("training", "deepseek-v3"),),
    "group-limited": (("training", "deepseek-v3"),),
    "scaling-factor": (("training", "deepseek-v3"),),
    "router-in-fp64": (("layer", "router-in-fp64"),),
    "capacity-drops": (("layer", "fewer-than-k-choices"),),
    "dense-first-layer": (("training", "deepseek-v3"),),
    "shared-expert": (("layer", "deepseek-v3"), ("training", "deepseek-v3")),
    "shared-expert-gate": (("layer", "shared-gate"), ("parallelism", "tp2-shared-gate")),
    "deterministic": (("launch", "deepseek-v3"), ("launch", "qwen3")),
    "recompute-moe": (
        ("layer", "recompute-moe"),
        ("training", "recompute-moe"),
        ("engine", "deepseek-v3-tp2-ep4"),
    ),
    "recompute-activation": (("engine", "deepseek-v3-tp2"),),
    "recompute-attention": (("gradients", "recompute-norms-moe"),),
    "recompute-norm": (("gradients", "recompute-norms"), ("engine", "deepseek-v3-recompute")),
    "recompute-shared-expert": (("layer", "recompute-shared-experts"),),
    "recompute-everything": (("training", "recompute-full"), ("engine", "qwen3-recompute-full")),
    "deprecated-recompute-flag": (("layer", "recompute-moe-old-flag"),),
    "multi-token-prediction": (("gradients", "mtp-repeated"),),
    "expert-parallel": (("parallelism", "cp2-ep4"), ("engine", "qwen3-tp2-ep4")),
    "tensor-parallel": (
        ("parallelism", "tp2-ep4"),
        ("engine", "deepseek-v3-tp2"),
        ("engine", "qwen3-tp2-ep4"),
    ),
    "grouped-gemm-experts": (("engine", "deepseek-v3"), ("launch", "qwen3")),
    "bf16": (("training", "bf16"),),
    "iteration-graph": (("graph", ""),),
}
# What is no field of a TransformerConfig: flags -> the runs that have them.
OF_TRAINING: dict[str, tuple[tuple[str, str], ...]] = {
    "--use-distributed-optimizer, --overlap-grad-reduce, --overlap-param-gather": (
        ("training", "distributed-optimizer"),
        ("gather", ""),
        ("parallelism", "pp2-interleaved-sharded"),
        ("engine", "qwen3-dp2"),
    ),
    "--transformer-impl transformer_engine, --multi-latent-attention": (
        ("engine", "deepseek-v3"),
        ("launch", "deepseek-v3"),
    ),
    "--moe-permute-fusion": (("launch", "qwen3"),),
    "--moe-single-grouped-weight": (("engine", "qwen3-single-weight"),),
    "--clip-grad 0.05": (("gradients", "clipped"),),
    "--pipeline-model-parallel-size 2": (("parallelism", "pp2"),),
    "--num-virtual-stages-per-pipeline-rank 2": (("parallelism", "pp2-interleaved"),),
    "--context-parallel-size 2": (("parallelism", "cp2-ep4"),),
    "--ckpt-format torch_dist": (
        ("checkpoints", ""),
        ("sharded", ""),
        ("launch", "deepseek-v3"),
    ),
}
# Rows about a field that, as it stands there, does nothing.
IDLE = {
    "graph-modules-without-graphs",
    "offload-modules-without-offload",
    "recompute-modules-without-recompute",
    "overlap-without-shared-expert",
    "no-moe-layers",
    "no-moe-layers-and-bias",
}
# Not the field that a row is about, but one that it needs.
COMPANIONS = {
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "fine_grained_activation_offloading",
    "params_dtype",
    "moe_ffn_hidden_size",
    "ffn_hidden_size",
}


_ORDER = ("works", "accepted", "refused")


@dataclass(frozen=True, kw_only=True)
class Row:
    flags: str
    verdict: str  # works | accepted | refused
    why: str  # of a refusal: the rule, and what to do
    tests: tuple[str, ...]


def rows() -> list[Row]:
    """What works, what is accepted, what is refused."""
    parsed = _flags()
    found = []
    for works in _cases().WORKS:
        if works.id in IDLE:
            continue
        runs = tuple(COMPARED[test].format(case) for test, case in RUNS.get(works.id, ()))
        row = Row(
            flags=_said(works.fields, parsed),
            verdict="works" if runs else "accepted",
            why="",
            tests=(f"tests/test_config.py::test_works[{works.id}]", *runs),
        )
        found.append(row)
    for flags, runs in OF_TRAINING.items():
        tests = tuple(COMPARED[test].format(case) for test, case in runs)
        found.append(Row(flags=flags, verdict="works", why="", tests=tests))
    names, arguments = _refused_ids(), _cases().REFUSED_ARGUMENTS
    for rule in (*RULES, *ARGUMENT_RULES):
        mine = [row for row in _cases().REFUSED if row.rule == rule.name]
        flags = dict.fromkeys(_said(row.fields, parsed) for row in mine)
        ids = [f"test_refused[{names[id(row)]}]" for row in mine]
        ids += [f"test_refused_arguments[{'-'.join(a)}]" for a in arguments if a[0] == rule.name]
        if rule.name == "moe_megakernel_backend":  # of a newer Megatron
            ids.append("test_two_selectors_are_refused")
        row = Row(
            flags=" or ".join(flags) or _said({rule.name: True}, parsed),
            verdict="refused",
            why=f"{rule.must}; {rule.remedy}",
            tests=tuple(f"tests/test_config.py::{name}" for name in ids),
        )
        found.append(row)
    return sorted(found, key=lambda row: _ORDER.index(row.verdict))


def _refused_ids() -> dict[int, str]:
    """id(row) -> pytest's id; it numbers those that are the same."""
    words = [row.words.replace(" ", "-") for row in _cases().REFUSED]
    seen: Counter[str] = Counter()
    names = {}
    for row, name in zip(_cases().REFUSED, words, strict=True):
        number = f"{'_' * name[-1].isdigit()}{seen[name]}" if words.count(name) > 1 else ""
        names[id(row)] = name + number
        seen[name] += 1
    return names


def _flags() -> dict[tuple[str, bool], str]:
    """(field, whether it sets a true value) -> the first long flag, as Megatron's parser has it."""
    arguments = importlib.import_module("megatron.training.arguments")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags: dict[tuple[str, bool], str] = {}
    for action in parser._actions:
        for option in action.option_strings:
            flags.setdefault((action.dest, action.const is not False), option)
    # What Megatron copies into a field of another name.
    flags["num_moe_experts", True] = "--num-experts"
    flags["fp8", True], flags["fp4", True] = "--fp8-format", "--fp4-format"
    return flags


def _said(fields: dict[str, Any], flags: dict[tuple[str, bool], str]) -> str:
    own = {key: value for key, value in fields.items() if key not in COMPANIONS} or fields
    words = []
    for key, value in own.items():
        if isinstance(value, bool) and (key, value) not in flags:
            opposite = flags.get((key, not value))
            words.append(f"without {opposite}" if opposite else f"{key}={value}")
        else:
            words.append(f"{flags.get((key, True), key)} {_text(value)}".strip())
    return ", ".join(words) or "--moe-token-dispatcher-type mok"


def _text(value: Any) -> str:
    if value is True:
        return ""
    if isinstance(value, list):
        return " ".join(map(_text, value))
    if isinstance(value, SimpleNamespace):  # stands for any object
        return ""
    return str(getattr(value, "__name__", value)).removeprefix("torch.")


def markdown(table: list[Row]) -> str:
    lines = ["| flags | | backed by |", "|---|---|---|"]
    for row in table:
        tests = ", ".join(f"`{test.removeprefix('tests/')}`" for test in row.tests)
        cells = (f"`{row.flags}`", f"{row.verdict}{row.why and f': {row.why}'}", tests)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def main(tokens: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Megatron flags under mok, and their tests.")
    parser.add_argument("--json", action="store_true", help="JSON lines in place of Markdown")
    as_json = parser.parse_args(tokens).json
    if sys.stderr.isatty():
        print("mok: importing Megatron (seconds) ...", file=sys.stderr)
    table = rows()
    if as_json:
        print("\n".join(json.dumps(asdict(row)) for row in table))
    else:
        print(markdown(table))


if __name__ == "__main__":
    main(sys.argv[1:])
