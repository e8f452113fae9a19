"""The grouped products on a GPU: against float64, bit for bit, past 2^31, under sanitizers."""

from __future__ import annotations

import os
import pathlib
import random
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from mok_megatron.backends import library
from tests.csrc import grouped
from tests.csrc.grouped import Layout

pytestmark = pytest.mark.gpu
CSRC = pathlib.Path(__file__).resolve().parents[2] / "csrc"

PASSES: dict[str, tuple[Callable[..., object], dict[str, object]]] = {
    "product": (grouped.check_product, {}),
    "input_gradient": (grouped.check_product, {"gradient": True}),
    "up": (grouped.check_up, {}),
    "down_gradient": (grouped.check_down_gradient, {}),
    "add fp32": (grouped.check_weight_gradient, {}),
    "add bf16": (grouped.check_weight_gradient, {"dtype": torch.bfloat16}),
    "fresh fp32": (grouped.check_weight_gradient, {"accumulate": False}),
    "fresh bf16": (
        grouped.check_weight_gradient,
        {"accumulate": False, "dtype": torch.bfloat16},
    ),
}
TWO_TILINGS = ("product", "input_gradient", "up", "down_gradient")
CASES = 45  # of each pass and tiling: 540 in all


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    library.load()


def random_case(seed: int) -> tuple[Layout, int, int, int]:
    draw = random.Random(seed)
    experts = draw.choice((1, 2, 3, 8, 8, 16, 40))
    few = draw.random() < 0.5
    counts = [draw.choice(grouped.COUNTS) if few else draw.randrange(300) for _ in range(experts)]
    a, b = (64 * draw.choice((1, 2, 3, 5, 8, 12, 17, 24)) for _ in range(2))
    return Layout.of(counts), a, b, draw.choice((0, 0, 1, 5, 200))


@pytest.mark.parametrize("tiling", [1, 2])
@pytest.mark.parametrize("name", PASSES)
def test_against_float64(name: str, tiling: int) -> None:
    if tiling == 2 and name not in TWO_TILINGS:
        pytest.skip("weight gradients have one tiling")
    check, mode = PASSES[name]
    first = random.SystemRandom().randrange(2**32)
    print(f"seeds {first} to {first + CASES - 1}")
    for seed in range(first, first + CASES):
        torch.manual_seed(seed)
        layout, a, b, ctas = random_case(seed)
        check(layout, a, b, tiling=tiling, ctas=ctas, **mode)


def outputs_of(
    name: str, seed: int, layout: Layout, a: int, b: int, **how: int
) -> list[torch.Tensor]:
    check, mode = PASSES[name]
    torch.manual_seed(seed)
    found = check(layout, a, b, **mode, **how)
    return found if isinstance(found, list) else [found]


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for x, y in zip(one, other, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("name", TWO_TILINGS)
def test_tilings_give_the_same_bits(name: str) -> None:
    layout = Layout.of([300, 0, 1, 64, 65, 700, 129])
    for h, f in [(1024, 704), (64, 192), (2880, 256)]:
        one, other = (outputs_of(name, 7, layout, h, f, tiling=t) for t in (1, 2))
        assert_same(one, other)


@pytest.mark.parametrize("name", PASSES)
def test_any_number_of_ctas_gives_the_same_bits(name: str) -> None:
    layout = Layout.of([300, 0, 1, 64, 65, 700, 129])
    one, *others = (outputs_of(name, 3, layout, 512, 832, ctas=c) for c in (0, 1, 7, 131))
    for other in others:
        assert_same(one, other)


@pytest.mark.parametrize("name", PASSES)
def test_a_hundred_runs_give_the_same_bits(name: str) -> None:
    layout = Layout.of([300, 0, 1, 64, 65, 700, 129, 1000])
    first = outputs_of(name, 5, layout, 768, 1088)
    for _ in range(99):
        assert_same(first, outputs_of(name, 5, layout, 768, 1088))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """The same rows and weight: alone, in another slab, behind others, in a longer expert."""
    h, n = 576, 448
    x = torch.randn(200, h, device="cuda").to(torch.bfloat16)
    w = torch.randn(n, h, device="cuda").to(torch.bfloat16)
    other = torch.randn(n, h, device="cuda").to(torch.bfloat16)

    def product(counts: list[int], at: int, rows: int, shift: int) -> torch.Tensor:
        layout = Layout.of(counts)
        a = layout.random(h)
        first = layout.starts[at] + shift
        a[first : first + rows] = x[:rows]
        matrices = library.Matrices.of(
            [w if e == at else other for e in range(len(counts))], "product"
        )
        out = layout.output(n)
        library.product(a, matrices, layout.split, out)
        return out[first : first + rows]

    alone = product([60], 0, 60, 0)
    for counts, at, shift in [
        ([60, 5], 0, 0),
        ([128], 0, 64),
        ([129, 1, 300], 2, 190),
        ([1000], 0, 900),
    ]:
        assert torch.equal(alone, product(counts, at, 60, shift))


@pytest.mark.parametrize("accumulate", [True, False])
def test_a_gradient_depends_on_its_experts_rows_alone(accumulate: bool) -> None:
    m, n, rows = 320, 448, 333
    a, b = (torch.randn(rows, c, device="cuda").to(torch.bfloat16) for c in (m, n))
    old = torch.randn(m, n, device="cuda")

    def gradient(counts: list[int], at: int, spare: int, ctas: int) -> torch.Tensor:
        layout = Layout.of(counts, spare=spare)
        left, right = layout.random(m), layout.random(n)
        where = slice(layout.starts[at], layout.starts[at] + rows)
        left[where], right[where] = a, b
        matrices = [old.clone() if e == at else torch.zeros_like(old) for e in range(len(counts))]
        table = library.Matrices.of(matrices, "gradient")
        how = {"accumulate": accumulate, "ctas": ctas}
        library.weight_gradient(left, right, table, layout.split, **how)
        return table.matrices[at]

    alone = gradient([rows], 0, 0, 0)
    for counts, at, spare, ctas in [([rows, 64], 0, 128, 1), ([5, 0, rows, 900], 2, 0, 9)]:
        assert torch.equal(alone, gradient(counts, at, spare, ctas))


def test_one_block_of_weights_equals_scattered_ones() -> None:
    layout = Layout.of([100, 200, 0, 300])
    a, outs = layout.random(256), []
    for contiguous in (True, False):
        torch.manual_seed(1)
        w = grouped.weights("product", 4, 512, 256, contiguous=contiguous)
        outs.append(layout.output(512))
        library.product(a, w, layout.split, outs[-1])
    assert_same(outs[:1], outs[1:])


def test_gaps_between_experts_are_skipped() -> None:
    layout = Layout.of([70, 0, 130])
    starts = torch.tensor([128, 384, 768, 1152], dtype=torch.int32, device="cuda")
    split = library.Split.of(starts, layout.split.row_count_E)
    a = torch.full((1280, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    w = grouped.weights("product", 3, 192, 128)
    real = torch.zeros(1280, dtype=torch.bool, device="cuda")
    for start, count in [(128, 70), (768, 130)]:
        a[start : start + count] = torch.randn(count, 128, device="cuda").to(torch.bfloat16)
        real[start : start + count] = True
    out = torch.full((1280, 192), grouped.SENTINEL, dtype=torch.bfloat16, device="cuda")
    library.product(a, w, split, out)
    assert bool((out[~real] == grouped.SENTINEL).all())
    for e, start, count in [(0, 128, 70), (2, 768, 130)]:
        rows = slice(start, start + count)
        grouped.assert_close("out", out[rows], a[rows].double() @ w.matrices[e].double().t(), 3e-3)


def test_no_rows_at_all() -> None:
    for counts in ([0], [0, 0, 0]):
        layout = Layout.of(counts)
        grouped.check_product(layout, 128, 192)
        grouped.check_up(layout, 128, 192)
        grouped.check_down_gradient(layout, 128, 192)
        for accumulate in (True, False):
            grouped.check_weight_gradient(layout, 128, 192, accumulate=accumulate)


def test_gpt_oss_extents() -> None:
    layout = Layout.of([333, 64, 0, 500])
    grouped.check_up(layout, 2880, 2880)
    grouped.check_down_gradient(layout, 2880, 2880)
    grouped.check_weight_gradient(layout, 2880, 2880)


@pytest.mark.parametrize("name", PASSES)
def test_offsets_past_two_to_the_31(name: str) -> None:
    """The last expert's rows lie past 2^31 elements of the wide operands, and of the outputs."""
    check, mode = PASSES[name]
    layout = Layout.of([70, 200], gap=2**31 // 7168 // 128 * 128 + 128)
    widest = 3584 if name in ("up", "down_gradient") else 7168  # gate and up have twice the columns
    for a, b in ((7168, 64), (64, widest)):
        assert layout.starts[1] * 7168 >= 2**31
        check(layout, a, b, **mode)


def test_a_captured_graph_follows_the_counts() -> None:
    """The split is read on the device: one captured call serves any counts."""
    layout = Layout.of([256, 256])
    a = torch.randn(layout.rows, 128, device="cuda").to(torch.bfloat16)
    w, out = grouped.weights("product", 2, 192, 128), layout.output(192)
    library.product(a, w, layout.split, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        library.product(a, w, layout.split, out)
    for counts in ([256, 1], [0, 200], [65, 64]):
        layout.split.row_count_E.copy_(torch.tensor(counts, dtype=torch.int32))
        replayed, eager = out.fill_(grouped.SENTINEL), layout.output(192)
        graph.replay()
        library.product(a, w, layout.split, eager)
        assert_same([replayed], [eager])
        assert int((replayed[:, 0] != grouped.SENTINEL).sum()) == sum(counts)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


SETUP = """
import torch
from mok_megatron.backends import library
from tests.csrc import grouped
library.load()
layout = grouped.Layout.of([64, 64])
a, out = layout.random(128), layout.output(192)
"""
RESULT = """
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    library.product(a, w, layout.split, out)
except RuntimeError as error:
    print(error)
"""


def test_rows_outside_the_contract_raise_with_the_reason() -> None:
    wrong = (
        SETUP + "w = grouped.weights('product', 2, 192, 128)\nlayout.split.row_start_E.add_(64)\n"
    )
    found = run_python(wrong + "library.product(a, w, layout.split, out)" + RESULT)
    assert "row_start / row_count are not 128-aligned" in found.stdout, found.stderr


def test_a_table_of_another_role_raises_with_the_reason() -> None:
    wrong = SETUP + "w = grouped.weights('input_gradient', 2, 192, 128)\n"
    found = run_python(wrong + "library.product(a, w, layout.split, out)" + RESULT)
    assert "describes other matrices or boxes" in found.stdout, found.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_sanitizer(tool: str) -> None:
    """All cases of scripts/sanitize.py, which says what they are."""
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("needs compute-sanitizer, found none")
    script = str(CSRC.parent / "scripts" / "sanitize.py")
    command = [sys.executable, script, "--tools", tool, "--shards", "4", "--limit", "800"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-1000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_delays_change_nothing(tmp_path: pathlib.Path) -> None:
    """The attack on the parity arguments: every order of the roles that the protocol allows."""
    nvcc = pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    if not nvcc.is_file():
        pytest.skip(f"needs nvcc to build the kernels with delays, found no {nvcc}")
    delayed = tmp_path / "_C.abi3.so"
    build_delayed(nvcc, delayed)
    command = [sys.executable, "-m", "tests.csrc.attack", "--library", str(delayed)]
    seed = str(random.SystemRandom().randrange(2**31))
    command += ["--cases", "25", "--layers", "40", "--seed", seed]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, f"seed {seed}: " + found.stdout[-1000:] + found.stderr[-2000:]


def build_delayed(nvcc: pathlib.Path, library_file: pathlib.Path) -> None:
    """The library with -DMOK_RANDOM_DELAYS, beside the one under test."""
    from torch.utils.cpp_extension import include_paths, library_paths

    sources = [*sorted(CSRC.rglob("*.cu")), *sorted(CSRC.glob("*.cpp"))]
    flags = ["-std=c++20", "-O3", "-Xcompiler=-fPIC", "-DMOK_RANDOM_DELAYS", "-DUSE_CUDA"]
    flags += ["-gencode=arch=compute_90a,code=sm_90a", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    flags += [f"-I{path}" for path in include_paths()]
    objects = [library_file.parent / f"{source.name}.o" for source in sources]
    running = [
        subprocess.Popen([str(nvcc), *flags, "-c", str(source), "-o", str(to)])
        for source, to in zip(sources, objects, strict=True)
    ]
    assert [process.wait(timeout=500) for process in running] == [0] * len(sources)
    link = [str(nvcc), "-shared", "-cudart=shared", *map(str, objects), "-o", str(library_file)]
    link += [f"-L{path}" for path in library_paths()]
    subprocess.run([*link, "-ltorch", "-ltorch_cpu", "-lc10"], check=True, timeout=100)
