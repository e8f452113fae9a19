"""What a layer benchmark computes: shapes, loads, random tensors, and the passes of its bound.

Data are Gaussian, weights divided by the root of their depth, so that every value is of unit size;
zeros would run faster and prove nothing. FLOPs count the routed rows and the shared expert's
tokens, never padding. Letters as in mok_megatron/contract.py; K choices, all of them used.

Loads     balanced (each expert the same rows), random (each token K experts, all alike), zipf (the
          same with weight 1/rank), empty (random over three quarters of the experts), hot: one
          expert has half the rows. A token chooses an expert once, so for K > 2 `hot` has the same
          rows as two choices of T * K / 2 tokens; pairs is balanced with the same two choices, to
          compare it with.
Bound     A pass of the layer is one product over all rows. `bytes` is what no order of computation
          avoids: each token's x and dy once, each weight of an expert with rows once a direction,
          g|u written and read (a backward needs it), y and dx, and each weight gradient: fp32 read
          and written where it accumulates, bf16 written where it is fresh. Anything that could stay
          in a cache between two passes (activations, their gradients, the rows' copies) is left
          out.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

BF16_BYTES, FP32_BYTES = 2, 4
LOADS = ("balanced", "random", "zipf", "pairs", "hot", "empty")


class BenchError(Exception):
    """Something the user can set right; the message is the one line they read."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One layer on one rank. Raises BenchError when the numbers cannot describe one."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    ffn: int
    shared_ffn: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least, value = int(field.name != "shared_ffn"), getattr(self, field.name)
            if value < least:
                raise BenchError(
                    f"mok: {field.name} of a shape must be at least {least}, got {value}; "
                    "give --shape as T,K,E,H,F,S"
                )
        if self.top_k > self.experts:
            raise BenchError(
                f"mok: a token cannot choose {self.top_k} of {self.experts} experts, got K above "
                "E; raise --experts or lower K in --shape"
            )

    @property
    def rows(self) -> int:
        """N = T * K."""
        return self.tokens * self.top_k

    @property
    def forward_flop(self) -> int:
        """Of a forward; a backward does twice that."""
        return 6 * self.hidden * (self.rows * self.ffn + self.tokens * self.shared_ffn)

    def __str__(self) -> str:
        letters = dict(zip("TKEHFS", dataclasses.astuple(self), strict=True))
        return ", ".join(f"{letter} {value}" for letter, value in letters.items())


def _shape(*sizes: int) -> LayerShape:
    names = [field.name for field in dataclasses.fields(LayerShape)]
    return LayerShape(**dict(zip(names, sizes, strict=True)))


# What one rank of the public model holds at the expert parallel size that leaves it /N experts.
PRESETS = {
    "deepseek-v3/32": _shape(4096, 8, 32, 7168, 2048, 2048),
    "deepseek-v3/32-routed": _shape(4096, 8, 32, 7168, 2048, 0),  # without its shared expert
    "qwen3-235b/16": _shape(4096, 8, 16, 4096, 1536, 0),
    "qwen3-30b/16": _shape(8192, 8, 16, 2048, 768, 0),
    "qwen3-30b/128": _shape(8192, 8, 128, 2048, 768, 0),
    "glm-4.5/20": _shape(4096, 8, 20, 5120, 1536, 1536),
    "kimi-k2/48": _shape(4096, 8, 48, 7168, 2048, 2048),
    "gpt-oss-120b/16": _shape(8192, 4, 16, 2880, 2880, 0),  # its sizes; without its biases
    "mixtral-8x7b": _shape(8192, 2, 8, 4096, 14336, 0),
    "fixed-cost": _shape(128, 2, 8, 512, 256, 0),
}
# Experts of the public model behind a preset's name.
WHOLE = {
    "deepseek-v3": 256,
    "qwen3-235b": 128,
    "qwen3-30b": 128,
    "glm-4.5": 160,
    "kimi-k2": 384,
    "gpt-oss-120b": 128,
}
QUICK = ("deepseek-v3/32", "qwen3-235b/16", "qwen3-30b/16", "qwen3-30b/128")


def parse_shape(text: str) -> LayerShape:
    """`T,K,E,H,F,S`. Raises BenchError for anything else."""
    parts = text.split(",")
    if len(parts) != 6 or not all(part.strip().isdecimal() for part in parts):
        raise BenchError(
            f"mok: --shape must be six numbers T,K,E,H,F,S, got {text!r}; "
            "for example 4096,8,32,7168,2048,0"
        )
    return _shape(*map(int, parts))


def slice_of(name: str, shape: LayerShape, ranks: int) -> LayerShape:
    """What one of `ranks` ranks computes of a preset's model under balanced routing: its part of
    the experts, as many rows. With fewer experts than choices, each row is a choice of more tokens.

    Raises BenchError for a name without a model, or ranks that cannot share its experts evenly.
    """
    whole = WHOLE.get(name.partition("/")[0])
    if whole is None or whole % ranks:
        raise BenchError(
            "mok: --ep-sizes must divide the experts of a preset's public model, got "
            f"{ranks} for {name} with {whole or 'no known number of'} experts; use --experts"
        )
    experts = whole // ranks
    top_k = min(shape.top_k, experts)
    return dataclasses.replace(shape, experts=experts, top_k=top_k, tokens=shape.rows // top_k)


def loaded(shape: LayerShape, load: str) -> LayerShape:
    """The shape under a load: `hot` and `pairs` turn K > 2 choices into two of more tokens, rows
    unchanged."""
    if load in ("hot", "pairs") and shape.top_k > 2:
        return dataclasses.replace(shape, tokens=-(-shape.rows // 2), top_k=2)
    return shape


def choices(shape: LayerShape, load: str, seed: int) -> Tensor:
    """int32 [T, K] on the CPU, ids ascending in a row; `shape` as `loaded` gives it.

    Raises BenchError for an unknown load, and for one that the shape has too few experts for.
    """
    if load not in LOADS:
        raise BenchError(f"mok: a load must be one of {', '.join(LOADS)}, got {load!r}; choose one")
    generator = torch.Generator().manual_seed(seed)
    tokens, top_k, experts = shape.tokens, shape.top_k, shape.experts
    label_E = torch.randperm(experts, generator=generator)
    if load in ("balanced", "pairs"):
        slot_TK = torch.arange(shape.rows).view(tokens, top_k) % experts
        expert_TK = slot_TK[torch.randperm(tokens, generator=generator)]
    else:
        # The K largest of Gumbel noise plus log weight are a draw without replacement.
        uniform_TE = torch.rand(tokens, experts, generator=generator, dtype=torch.float64)
        score_TE = -(-uniform_TE.clamp_min(1e-300).log()).log()
        if load == "zipf":
            score_TE -= torch.arange(1, experts + 1).log()
        elif load == "hot":
            half = shape.rows // 2
            score_TE[:half, 0], score_TE[half:, 0] = torch.inf, -torch.inf
        elif load == "empty":
            used = experts - experts // 4
            if used == experts or used < top_k:
                raise BenchError(
                    "mok: the load `empty` needs three quarters of the experts to be K or more and "
                    f"fewer than all, got {experts} experts and K {top_k}; choose another load"
                )
            score_TE[:, used:] = -torch.inf
        expert_TK = score_TE.topk(top_k, dim=1).indices
    return label_E[expert_TK].sort(dim=1).values.to(torch.int32)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Tensors that all arms of a measurement share; every arm's weights are this memory.

    x, dy [T, H]; the routing once as top-k and once as Megatron's router gives it, dense; w1
    [E, 2F, H], gate rows first, w2 [E, H, F] and the shared expert's, or None; `main`, fp32 places
    for the weight gradients in the order of `weights`, or nothing where they are fresh.
    """

    shape: LayerShape
    load: str
    rows_E: tuple[int, ...]
    x_TH: Tensor
    dy_TH: Tensor
    expert_TK: Tensor
    prob_TK: Tensor
    routing_map_TE: Tensor
    probs_TE: Tensor
    w1: Tensor
    w2: Tensor
    shared_w1: Tensor | None
    shared_w2: Tensor | None
    main: tuple[Tensor, ...]

    @staticmethod
    def of(shape: LayerShape, load: str, seed: int, device: str, *, accumulate: bool) -> Problem:
        """The same values for the same seed on the same kind of device."""
        shape = loaded(shape, load)
        expert_TK = choices(shape, load, seed).to(device)
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> Tensor:
            values = torch.empty(size, dtype=torch.bfloat16, device=device)
            return values.normal_(
                std=1 if len(size) == 2 else size[-1] ** -0.5, generator=generator
            )

        hidden, ffn, shared = shape.hidden, shape.ffn, shape.shared_ffn
        prob_TK = torch.rand(expert_TK.shape, generator=generator, device=device) + 0.1
        prob_TK /= prob_TK.sum(dim=1, keepdim=True)
        probs_TE = prob_TK.new_zeros(shape.tokens, shape.experts)
        probs_TE.scatter_(1, expert_TK.long(), prob_TK)
        w1 = normal(shape.experts, 2 * ffn, hidden)
        w2 = normal(shape.experts, hidden, ffn)
        shared_w1 = normal(1, 2 * shared, hidden)[0] if shared else None
        shared_w2 = normal(1, hidden, shared)[0] if shared else None
        weights = [w for w in (w1, w2, shared_w1, shared_w2) if w is not None]
        return Problem(
            shape=shape,
            load=load,
            rows_E=tuple(torch.bincount(expert_TK.flatten(), minlength=shape.experts).tolist()),
            x_TH=normal(shape.tokens, hidden),
            dy_TH=normal(shape.tokens, hidden),
            expert_TK=expert_TK,
            prob_TK=prob_TK,
            routing_map_TE=probs_TE > 0,
            probs_TE=probs_TE,
            w1=w1,
            w2=w2,
            shared_w1=shared_w1,
            shared_w2=shared_w2,
            main=tuple(torch.zeros_like(w, dtype=torch.float32) for w in weights if accumulate),
        )

    @property
    def device(self) -> torch.device:
        return self.x_TH.device

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """w1, w2 and the shared expert's two, where there is one."""
        every = (self.w1, self.w2, self.shared_w1, self.shared_w2)
        return tuple(w for w in every if w is not None)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One product of a direction: out [m, n] over depth k, and the bytes it cannot avoid.

    `layout` says how the operands lie in memory: NT [m, k] [n, k], NN [m, k] [k, n], TN [k, m]
    [k, n].
    """

    name: str
    direction: str
    layout: str
    m: int
    n: int
    k: int
    bytes: int


def passes(shape: LayerShape, rows_E: tuple[int, ...], *, accumulate: bool) -> list[Pass]:
    """Of a forward and a backward, the shared expert's after the routed experts'."""
    groups = [("", sum(rows_E), shape.ffn, sum(rows > 0 for rows in rows_E), len(rows_E))]
    if shape.shared_ffn:
        groups.append(("shared ", shape.tokens, shape.shared_ffn, 1, 1))
    hidden, every = shape.hidden, []
    for prefix, rows, ffn, used, experts in groups:
        w1, w2 = 2 * ffn * hidden, hidden * ffn
        tokens = 0 if prefix else BF16_BYTES * shape.tokens * hidden  # the shared expert's are read
        gate_up = BF16_BYTES * rows * 2 * ffn
        for name, direction, layout, m, n, k, size in (
            (
                "up",
                "forward",
                "NT",
                rows,
                2 * ffn,
                hidden,
                tokens + BF16_BYTES * used * w1 + gate_up,
            ),
            ("down", "forward", "NT", rows, hidden, ffn, BF16_BYTES * used * w2 + tokens),
            (
                "down_gradient",
                "backward",
                "NN",
                rows,
                ffn,
                hidden,
                tokens + BF16_BYTES * used * w2 + gate_up,
            ),
            (
                "up_gradient",
                "backward",
                "NN",
                rows,
                hidden,
                2 * ffn,
                BF16_BYTES * used * w1 + tokens,
            ),
            (
                "w1_gradient",
                "backward",
                "TN",
                2 * ffn,
                hidden,
                rows,
                _written(w1, used, experts, accumulate),
            ),
            (
                "w2_gradient",
                "backward",
                "TN",
                hidden,
                ffn,
                rows,
                _written(w2, used, experts, accumulate),
            ),
        ):
            every.append(
                Pass(
                    name=prefix + name,
                    direction=direction,
                    layout=layout,
                    m=m,
                    n=n,
                    k=k,
                    bytes=size,
                )
            )
    return every


def _written(size: int, used: int, experts: int, accumulate: bool) -> int:
    """Bytes of the gradients of weights of `size` elements, of which `used` have rows."""
    return 2 * FP32_BYTES * used * size if accumulate else BF16_BYTES * experts * size


def bound_ms(pass_: Pass, product_ms: float, bytes_per_ms: float) -> float:
    """The longer of its product and of moving its bytes."""
    return max(product_ms, pass_.bytes / bytes_per_ms)
