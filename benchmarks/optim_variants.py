# SPDX-License-Identifier: BSD-3-Clause
# The optimizers that bench_optim.py compares, each on a copy of the same parameters with the same
# gradients, and the check that they compute the same.
from dataclasses import dataclass

import peers
import stock_lars
import torch
from shapes import CASES, parameters, split_into_groups
from timers import Timed
from torch import nn

import torch_renaissance as tr

STOCK = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
OURS = {"gather": "gather", "flat": "flat", "flat apart": "flat"}
CLASSES = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
OPTIMIZERS = (*CLASSES, "lars")
STATES = {"adamw": 2, "adam": 2, "sgd": 1, "lars": 1}
NORM_READS = {"lars": 2}  # of weight and gradient, before the update
CHECK_STEPS = 3
TOLERANCE = "16 eps x (|reference| + the tensor's largest move)"


@dataclass(frozen=True)
class Problem:
    """One case's starting point, shared by every variant."""

    case: str
    optimizer: str
    start: list[torch.Tensor]
    gradients: list[torch.Tensor]

    @property
    def size(self) -> int:
        return sum(t.numel() for t in self.start)


@dataclass
class Variant:
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    model: nn.Module


def stock_of(optimizer: str) -> tuple[str, ...]:
    return stock_lars.STOCK if optimizer == "lars" else tuple(STOCK)


def reference_of(optimizer: str) -> str:
    """What ratios refer to: the strongest stock option, or for LARS, which torch doesn't have,
    timm's, or a for-loop like timm's."""
    if optimizer != "lars":
        return "fused"
    return "timm" if stock_lars.HAS_TIMM else "for-loop"


def make_problem(case: str, optimizer: str, dtype: torch.dtype, device: torch.device) -> Problem:
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def gradient(shape: tuple[int, ...]) -> torch.Tensor:
        g = draw(shape)
        # Small gradients' squares vanish in fp16, and stock foreach then divides by zero.
        return (g + 0.5 * g.sign() if dtype == torch.float16 else g).to(dtype)

    shapes = CASES[case]()
    start = [(0.02 * draw(s)).to(dtype) for s in shapes]
    return Problem(case, optimizer, start, [gradient(s) for s in shapes])


def build(problem: Problem, name: str, capturable: bool = False, frozen: float = 0.0) -> Variant:
    """A stock optimizer, or one accelerated the way a user does it."""
    own = [nn.Parameter(t.clone()) for t in problem.start]
    for p in smallest_but(own, frozen):
        p.requires_grad_(False)
    if problem.optimizer == "lars":
        groups = split_into_groups(problem.case, own, stock_lars.OPTIONS["lr"])
        optimizer = stock_lars.make(name, groups)
    else:
        options = {"lr": 1e-3, "weight_decay": 1e-2}
        if problem.optimizer == "sgd":
            options["momentum"] = 0.9
        else:
            options["capturable"] = capturable
        groups = split_into_groups(problem.case, own, options["lr"])
        if name in peers.INSTALLED:
            optimizer = peers.make(name, problem.optimizer, groups, options)
        else:
            optimizer = CLASSES[problem.optimizer](groups, **options, **STOCK.get(name, {}))
    model: nn.Module = nn.ParameterList(own)
    if name in OURS:
        model, optimizer = tr.accelerate(model, optimizer, gradients=OURS[name])
    for p, g in zip(own, problem.gradients, strict=True):
        if p.requires_grad:
            p.grad = g.clone() if name in stock_lars.TIMMS else g
    return Variant(own, optimizer, model)


def smallest_but(own: list[nn.Parameter], frozen: float) -> list[nn.Parameter]:
    """The tensors to freeze, so that the small ones that stay hold 1 - frozen of the elements."""
    if frozen == 0:
        return []
    room = (1 - frozen) * sum(p.numel() for p in own)
    kept = set()
    for p in sorted(own, key=torch.Tensor.numel):
        room -= p.numel()
        if room < 0:
            break
        kept.add(id(p))
    return [p for p in own if id(p) not in kept]


def build_all(problem: Problem, capturable: bool = False) -> dict[str, Variant]:
    on_gpu = problem.start[0].is_cuda
    slow = on_gpu and problem.optimizer != "lars"
    names = [n for n in stock_of(problem.optimizer) if not (slow and n == "for-loop")]
    names += [*peers.peers_of(problem.optimizer, on_gpu), *OURS]
    return {n: build(problem, n, capturable) for n in names}


def timed_steps(variants: dict[str, Variant]) -> dict[str, Timed]:
    """`flat` packs inside its step; `flat update` and `flat pack` are its two halves."""
    steps = {n: Timed(v.optimizer.step) for n, v in variants.items() if n != "flat apart"}
    apart = variants["flat apart"].optimizer
    steps["flat update"] = Timed(apart.step, prepare=apart.pack_gradients)
    steps["flat pack"] = Timed(apart.pack_gradients)
    return steps


def bytes_per_parameter(problem: Problem) -> dict[str, int]:
    """The least a step must move: read gradient, read and write weight and states; norms first."""
    item = problem.start[0].element_size()
    reads = NORM_READS.get(problem.optimizer, 0)
    step = (3 + 2 * STATES[problem.optimizer] + reads) * item
    ours = {"gather": step, "flat": step + 2 * item, "flat update": step, "flat pack": 2 * item}
    return dict.fromkeys((*stock_of(problem.optimizer), *peers.INSTALLED), step) | ours


@torch.no_grad()
def check(problem: Problem, variants: dict[str, Variant]) -> dict:
    """Three steps of each, then every variant's parameters against those of torch's fused, or for
    LARS of the for-loop; timm's is left out, since it writes into its gradients. Peers round in
    another order, so of them the difference alone is kept."""
    against = "for-loop" if problem.optimizer == "lars" else "fused"
    for variant in variants.values():
        for _ in range(CHECK_STEPS):
            variant.optimizer.step()
    dtype = problem.start[0].dtype
    epsilon = torch.finfo(dtype).eps
    wide = torch.promote_types(dtype, torch.float32)
    reference = [p.to(wide) for p in variants[against].parameters]
    found = {"tolerance": TOLERANCE, "steps": CHECK_STEPS, "largest_difference": {}, "agrees": {}}
    for name, variant in variants.items():
        if name in (against, *stock_lars.TIMMS):
            continue
        worst, excess = [], []
        for p, r, s in zip(variant.parameters, reference, problem.start, strict=True):
            difference = (p.to(wide) - r).abs()
            allowed = 16 * epsilon * (r.abs() + (r - s.to(wide)).abs().max())
            worst.append(difference.max())
            excess.append((difference - allowed).max())
        found["largest_difference"][name] = float(torch.stack(worst).max())
        if name not in peers.INSTALLED:
            found["agrees"][name] = bool(torch.stack(excess).max() <= 0)
    return found


def fits(case: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Start, gradients, variants of weights and states, two flat planes, temporaries."""
    need = (22 + 3 * len(peers.INSTALLED)) * parameters(CASES[case]()) * dtype.itemsize
    return device.type != "cuda" or need < torch.cuda.mem_get_info(device)[0]
