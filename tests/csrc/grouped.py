"""Cases for the grouped products: layouts with poisoned padding, and checks against float64.

A check draws fresh random inputs, fills every padding row with NaN and every output with a
sentinel, runs one op, and asserts the error of each tensor and that no padding was written. It
returns the outputs for bitwise comparisons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from mok_megatron.backends import library

DEVICE = "cuda"
SENTINEL = 777.0
BF16 = 3e-3  # one rounding to bf16 is 1.7e-3 of the norm
FP32 = 5e-5
COUNTS = (0, 1, 7, 63, 64, 65, 127, 128, 129, 200, 511, 1000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    counts: tuple[int, ...]
    starts: tuple[int, ...]  # one more than counts
    rows: int  # of the buffers, past the last expert too
    split: library.Split
    real_R: torch.Tensor  # bool

    @classmethod
    def of(cls, counts: Sequence[int], *, spare: int = 128, gap: int = 0) -> Layout:
        """`gap`: unused rows after each expert's, a multiple of the row tile."""
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + -(-count // library.ROW_TILE) * library.ROW_TILE + gap)
        rows = starts[-1] + spare
        real = torch.zeros(rows, dtype=torch.bool)
        for start, count in zip(starts, counts, strict=False):
            real[start : start + count] = True
        ints = [torch.tensor(v, dtype=torch.int32, device=DEVICE) for v in (starts, list(counts))]
        return cls(
            counts=tuple(counts),
            starts=tuple(starts),
            rows=rows,
            split=library.Split.of(*ints),
            real_R=real.to(DEVICE),
        )

    def experts(self) -> list[tuple[int, slice]]:
        return [
            (e, slice(start, start + count))
            for e, (start, count) in enumerate(zip(self.starts, self.counts, strict=False))
            if count
        ]

    def random(self, columns: int) -> torch.Tensor:
        x = torch.randn(self.rows, columns, device=DEVICE).to(torch.bfloat16)
        x[~self.real_R] = float("nan")
        return x

    def prob(self) -> torch.Tensor:
        p = torch.rand(self.rows, device=DEVICE)
        p[~self.real_R] = float("nan")
        return p

    def output(self, *columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.full((self.rows, *columns), SENTINEL, dtype=dtype, device=DEVICE)

    def assert_padding_untouched(self, *outputs: torch.Tensor) -> None:
        for out in outputs:
            assert bool((out[~self.real_R] == SENTINEL).all()), "padding was written"


def weights(
    role: str, experts: int, rows: int, columns: int, *, tiling: int = 0, contiguous: bool = False
) -> library.Matrices:
    """Scaled random weights at unrelated addresses, or as one block."""
    block = torch.randn(experts, rows, columns, device=DEVICE) / columns**0.5
    matrices = list(block.to(torch.bfloat16))
    if not contiguous:  # in another order, with other tensors between
        matrices = [w.clone() for w in reversed(matrices)][::-1]
    return library.Matrices.of(matrices, role, tiling=tiling)


def error(value: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor | None = None) -> float:
    """Norm of the difference over the norm of `scale`, by default `exact`; NaN counts as infinite.

    Sums that nearly cancel have an error of the size of their terms, not of their own.
    """
    if exact.numel() == 0:
        return 0.0
    size = (exact if scale is None else scale).norm().clamp_min(1e-300)
    difference = float((value.double() - exact).norm() / size)
    return difference if difference == difference else float("inf")


def assert_close(
    name: str,
    value: torch.Tensor,
    exact: torch.Tensor,
    limit: float,
    scale: torch.Tensor | None = None,
) -> None:
    found = error(value, exact, scale)
    assert found <= limit, f"{name}: error {found:.2e} > {limit:.0e}, shape {tuple(value.shape)}"


def check_product(
    layout: Layout, n: int, k: int, *, gradient: bool = False, tiling: int = 0, ctas: int = 0
) -> torch.Tensor:
    """out = a · W^T, or a · W when gradient."""
    a = layout.random(k)
    role, shape = ("input_gradient", (k, n)) if gradient else ("product", (n, k))
    w = weights(role, len(layout.counts), *shape, tiling=tiling)
    out = layout.output(n)
    op = library.input_gradient if gradient else library.product
    op(a, w, layout.split, out, tiling=tiling, ctas=ctas)
    for e, rows in layout.experts():
        matrix = w.matrices[e].double()
        exact = a[rows].double() @ (matrix if gradient else matrix.t())
        assert_close(f"out of expert {e}", out[rows], exact, BF16)
    layout.assert_padding_untouched(out)
    assert layout.split.tickets.tolist() == [0, 0]
    return out


def check_up(
    layout: Layout, h: int, f: int, *, tiling: int = 0, ctas: int = 0
) -> list[torch.Tensor]:
    x, prob = layout.random(h), layout.prob()
    w1 = weights("up", len(layout.counts), 2 * f, h, tiling=tiling)
    gate_up, activation = layout.output(2 * f), layout.output(f)
    library.up(x, w1, prob, layout.split, gate_up, activation, tiling=tiling, ctas=ctas)
    for e, rows in layout.experts():
        exact = x[rows].double() @ w1.matrices[e].double().t()
        assert_close(f"gate|up of expert {e}", gate_up[rows], exact, BF16)
        g, u = gate_up[rows].double().chunk(2, -1)
        exact = g * torch.sigmoid(g) * u * prob[rows, None].double()
        assert_close(f"activation of expert {e}", activation[rows], exact, BF16)
    layout.assert_padding_untouched(gate_up, activation)
    return [gate_up, activation]


def check_down_gradient(
    layout: Layout, h: int, f: int, *, tiling: int = 0, ctas: int = 0
) -> list[torch.Tensor]:
    dy, prob, gate_up = layout.random(h), layout.prob(), layout.random(2 * f)
    w2 = weights("down_gradient", len(layout.counts), h, f, tiling=tiling)
    into = library.DownGradient(
        d_gate_up_RF=layout.output(2 * f),
        activation_RF=layout.output(f),
        prob_parts=layout.output(f // library.PART_COLUMNS, dtype=torch.float32),
        d_prob_R=layout.output(dtype=torch.float32),
    )
    library.down_gradient(dy, w2, prob, gate_up, layout.split, into, tiling=tiling, ctas=ctas)
    for e, rows in layout.experts():
        da = dy[rows].double() @ w2.matrices[e].double()
        g, u = gate_up[rows].double().chunk(2, -1)
        p, s = prob[rows, None].double(), torch.sigmoid(g)
        dg = da * p * u * s * (1 + g * (1 - s))
        du = da * p * g * s
        assert_close(f"dg|du of expert {e}", into.d_gate_up_RF[rows], torch.cat([dg, du], 1), BF16)
        assert_close(f"activation of expert {e}", into.activation_RF[rows], g * s * u * p, BF16)
        terms = da * g * s * u
        dp = terms.sum(1)
        assert_close(f"dp of expert {e}", into.d_prob_R[rows], dp, FP32, terms.norm(dim=1))
    outputs = [into.d_gate_up_RF, into.activation_RF, into.prob_parts, into.d_prob_R]
    layout.assert_padding_untouched(*outputs)
    return outputs


def check_weight_gradient(
    layout: Layout,
    m: int,
    n: int,
    *,
    dtype: torch.dtype = torch.float32,
    accumulate: bool = True,
    tiling: int = 0,
    ctas: int = 0,
) -> list[torch.Tensor]:
    a, b = layout.random(m), layout.random(n)
    experts = len(layout.counts)
    fill = torch.randn if accumulate else lambda *s, **k: torch.full(s, float("nan"), **k)
    old = [fill(m, n, device=DEVICE).to(dtype) for _ in range(experts)]
    table = library.Matrices.of([w.clone() for w in old], "gradient", tiling=tiling)
    library.weight_gradient(
        a, b, table, layout.split, accumulate=accumulate, tiling=tiling, ctas=ctas
    )
    for e, (start, count) in enumerate(zip(layout.starts, layout.counts, strict=False)):
        new, rows = table.matrices[e], slice(start, start + count)
        if count == 0:
            expected = old[e] if accumulate else torch.zeros_like(new)
            assert torch.equal(new, expected), f"gradient of empty expert {e}"
            continue
        exact = a[rows].double().t() @ b[rows].double()
        if accumulate:
            exact += old[e].double()
        limit = FP32 if dtype == torch.float32 else BF16
        assert_close(f"gradient of expert {e}", new, exact, limit)
    return list(table.matrices)
