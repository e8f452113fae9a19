"""Does one call give the same bytes every time? A layer repeated in a process, and in fresh ones.

Every process draws the same layer and the same tokens, with an expert that most of them choose, one
without rows, and empty slots. Between repeats memory is taken, filled with NaN and given back in
sizes that change, so that neither the addresses of a call's memory nor what it holds before are the
same. Compared are y, dx, the gradient of the probabilities, and all weight gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mok_megatron.doctor.machine import ask

if TYPE_CHECKING:
    import torch

    from mok_megatron.contract import Backend
    from mok_megatron.doctor.probes import Report

REPEATS, PROCESSES = 100, 3
# Several row tiles of the kernels for the busy expert; the reference has no tiles.
TOKENS = {"cuda": 400, "reference": 80}
RESULTS = ("y", "dx", "dprob", "dW")


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """What the processes saw.

    `hashes`: of each result, the different SHA-256 that came up over all calls, sorted; one each is
    determinism. `calls`: how many were made in all. `faults`: what kept a process from its calls.
    """

    backend: str
    calls: int
    hashes: dict[str, list[str]]
    faults: dict[str, str]

    @property
    def same(self) -> bool:
        """Every call was made, and all bytes of all results are equal."""
        whole = self.calls == REPEATS * PROCESSES and not self.faults
        return whole and all(len(self.hashes.get(name, ())) == 1 for name in RESULTS)


def repeat(backend: str, limit: float) -> Repeats:
    """Run `backend` (cuda or reference) on this machine; a process gets `limit` seconds."""
    calls = 0
    seen: dict[str, set[str]] = {name: set() for name in RESULTS}
    faults: dict[str, str] = {}
    for number in range(PROCESSES):
        facts, trouble = ask(f"{__name__}:ask_{backend}", limit)
        calls += facts.get("calls", 0)
        for name, hashes in facts.get("hashes", {}).items():
            seen[name] |= set(hashes)
        faults |= {f"process {number}, {step}": words for step, words in trouble.items()}
    hashes = {name: sorted(found) for name, found in seen.items()}
    return Repeats(backend=backend, calls=calls, hashes=hashes, faults=faults)


def render(found: Repeats) -> str:
    """The answer in lines."""
    lines = [f"The same bytes? {found.calls} calls in {PROCESSES} processes, {found.backend}:", ""]
    for name in RESULTS:
        hashes = found.hashes[name]
        shown = hashes[0] if len(hashes) == 1 else f"{len(hashes)} different results"
        lines.append(f"  {name:<6} {shown}")
    lines += [f"  {step}: {words}" for step, words in found.faults.items()]
    return "\n".join([*lines, "", "All bytes are equal." if found.same else "NOT all are equal."])


# In a process of its own.


def ask_reference(report: Report) -> None:
    """Probe: the reference on the CPU. One thread: more hinder each other where others work."""
    import torch

    torch.set_num_threads(1)
    _ask("reference", "cpu", report)


def ask_cuda(report: Report) -> None:
    """Probe: the kernels on the first GPU."""
    _ask("cuda", "cuda:0", report)


def _ask(name: str, device: str, report: Report) -> None:
    with report.step("repeating a layer"):
        import torch

        from mok_megatron.doctor import trial

        where = torch.device(device)
        backend = trial.choose(name, where)
        report.facts(calls=REPEATS, hashes=hashes_of(backend, where, REPEATS))


def hashes_of(backend: Backend, device: torch.device, calls: int) -> dict[str, list[str]]:
    """The different hashes of each result over `calls` calls. Raises what the backend raises."""
    import torch

    from mok_megatron.contract import Weights
    from mok_megatron.function import fused_moe

    shape = backend.shape
    generator = torch.Generator().manual_seed(4321)

    def normal(*size: int) -> Any:
        values = torch.randn(*size, generator=generator).div(size[-1] ** 0.5)
        return values.to(shape.dtype).to(device)

    widths = [shape.ffn] * shape.num_experts + [shape.shared_ffn]
    w1 = [normal(2 * width, shape.hidden) for width in widths]
    w2 = [normal(shape.hidden, width) for width in widths]
    tokens = TOKENS[backend.name]
    x_TH, dy_TH = normal(tokens, shape.hidden), normal(tokens, shape.hidden)
    score_TE = torch.rand(tokens, shape.num_experts, generator=generator)
    score_TE[::2, 1] += 1  # most choose it
    score_TE[:, 0] = -1  # an expert without rows
    expert_TK = score_TE.topk(shape.top_k).indices.to(torch.int32)
    expert_TK[::7, 1] = -1
    prob_TK = torch.rand(expert_TK.shape, generator=generator).masked_fill(expert_TK < 0, 0)
    expert_TK, prob_TK = expert_TK.to(device), prob_TK.to(device)
    leaves = [v.requires_grad_() for v in (x_TH, prob_TK, *w1, *w2)]
    experts = shape.num_experts
    weights = Weights(
        w1=tuple(w1[:experts]), w2=tuple(w2[:experts]), shared_w1=w1[-1], shared_w2=w2[-1]
    )
    seen: dict[str, set[str]] = {name: set() for name in RESULTS}
    for call in range(calls):
        for size in (1 << 10, 1 << 17, 1 << 20):
            torch.full((size + 4099 * (call * 7 % 13),), float("nan"), device=device)
        y_TH = fused_moe(x_TH, expert_TK, prob_TK, weights, backend)
        dx_TH, dprob_TK, *dw = torch.autograd.grad(y_TH, leaves, dy_TH)
        for name, values in zip(RESULTS, ([y_TH], [dx_TH], [dprob_TK], dw), strict=True):
            seen[name].add(_sha256(values))
    return {name: sorted(found) for name, found in seen.items()}


def _sha256(values: list[torch.Tensor]) -> str:
    import hashlib

    import torch

    digest = hashlib.sha256()
    for value in values:
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
