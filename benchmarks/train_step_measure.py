# SPDX-License-Identifier: BSD-3-Clause
# How whole training steps are measured: the first steps of a variant (losses, start-up, memory),
# rounds in which all variants take turns, and the kernels of a step. A failure becomes a reason.
import itertools
import statistics
import time
from collections.abc import Callable

import timers
import torch
from common import reason
from optim_costs import count_launches
from tables import progress
from torch import Tensor
from train_step_cases import Case, make_batches, make_model
from train_step_report import difference
from train_step_variants import TOLERANCE, VARIANTS, WARMUP, Setting, Variant

FIRST = 10  # steps whose losses are compared before anything is timed
LAST = 3  # of those, the ones that are taken as steady
HOST_SAMPLES = 3  # in each round
LONGEST_TURN = 2000  # steps of one variant in one round
ROUNDS, QUICK_ROUNDS = 60, 5  # a host's moods last a second: many turns, a second apart
LEAST_ROUNDS = 7  # of steps so long that all rounds would take more than twice the budget

Batches = list[tuple[Tensor, Tensor]]
Run = Callable[[], object]


def first_steps(variant: Variant, batches: Batches, device: torch.device) -> dict:
    """Losses of the first steps, what they took beyond later ones, and when the first replay was.

    `start_s` holds compilation, autotuning, warm-up and capture; `first_replay_s` runs from the
    first call to the end of the first call that replayed.
    """
    losses, seconds, first_replay = [], [], None
    begin = time.perf_counter()
    for x, y in itertools.islice(itertools.cycle(batches), FIRST):
        start = time.perf_counter()
        loss = variant.step(x, y)
        timers.synchronize(device)
        now = time.perf_counter()
        seconds.append(now - start)
        if first_replay is None and variant.replayed():
            first_replay = round(now - begin, 4)
        losses.append(float(loss))
    steady = statistics.median(seconds[-LAST:])
    return {
        "losses": losses,
        "start_s": round(max(0.0, sum(seconds) - FIRST * steady), 4),
        "first_replay_s": first_replay,
    }


def prepare(name: str, setting: Setting, batches: Batches) -> tuple[dict, Variant | None]:
    """Builds a variant and takes its first steps; memory is what it adds to what was there."""
    device, on_gpu = setting.device, setting.device.type == "cuda"
    timers.release(device)
    if on_gpu:
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
    try:
        variant = VARIANTS[name](setting)
        taken = first_steps(variant, batches, device)
        taken["explain"] = variant.explain()
    except Exception as error:  # the other variants are still worth having
        return {"failed": reason(error)}, None
    if on_gpu:
        taken["peak_bytes"] = torch.cuda.max_memory_allocated() - allocated
        taken["reserved_bytes"] = torch.cuda.max_memory_reserved() - reserved
    return taken, variant


def host_time(run: Run, device: torch.device) -> float:
    """The call alone, with nothing queued on the device and without waiting for it."""
    timers.synchronize(device)
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    timers.synchronize(device)
    return seconds


def time_rounds(
    runs: dict[str, Run], device: torch.device, rounds: int, budget: float
) -> dict[str, dict]:
    """Turns of many runs with one synchronize, A B C C B A …, in about `budget` seconds.

    A run that raises on the way gets its reason instead of times, and no further turn.
    """
    turn = budget / max(1, rounds * len(runs))
    failed: dict[str, dict] = {}
    repeats: dict[str, int] = {}
    walls: dict[str, list[float]] = {name: [] for name in runs}
    hosts: dict[str, list[float]] = {name: [] for name in runs}

    def take(name: str, run: Run) -> None:
        if name not in repeats:
            trial = timers.wall_time(run, 2, device)
            repeats[name] = max(1, min(LONGEST_TURN, int(turn / trial)))
        walls[name].append(timers.wall_time(run, repeats[name], device))
        if device.type == "cuda":
            hosts[name] += [host_time(run, device) for _ in range(HOST_SAMPLES)]

    start = time.perf_counter()
    with timers.no_garbage_collection():
        for done in range(rounds):
            if done >= LEAST_ROUNDS and time.perf_counter() - start > 2 * budget:
                break
            # There and back: how hot a GPU is when a turn begins depends on the turn before.
            turns = list(runs.items())
            for name, run in turns if done % 2 == 0 else reversed(turns):
                try:
                    if name not in failed:
                        take(name, run)
                except Exception as error:
                    failed[name] = {"failed": reason(error)}
    found = {}
    for name in (n for n in runs if n not in failed):
        found[name] = {"us": timers.summary(walls[name]), "repeats": repeats[name]}
        if hosts[name]:
            found[name]["host_us"] = timers.summary(hosts[name])
    return found | failed


def kernels_of(name: str, setting: Setting, batches: Batches) -> dict:
    """Kernels, copies and memsets of a step of a fresh variant; {} if the profiler saw none."""
    try:
        variant = VARIANTS[name](setting)
        for x, y in itertools.islice(itertools.cycle(batches), WARMUP + 3):
            variant.step(x, y)
        counts = count_launches(lambda: variant.step(*batches[0]))
        variant.close()
    except Exception as error:  # no profiler on this machine: the times stand without it
        return {"kernels_failed": reason(error)}
    return {"kernels": counts}


# --- a whole case ---------------------------------------------------------------------------------


def setting_of(case: Case, quick: bool, precision: str, device: torch.device) -> Setting:
    """Compiled code of earlier cases is dropped, else another batch size of a model that has been
    compiled already would get dynamic shapes."""
    torch.compiler.reset()
    timers.release(device)
    return Setting(case, make_model(case, quick), precision, device)


def measure(setting: Setting, names: list[str], quick: bool, budget: float, taken: dict) -> None:
    """Every variant's first steps, compared with eager's (else the first one's), then rounds in
    which all take turns. `taken` is filled on the way: what precedes a failure is kept."""
    case, device = setting.case, setting.device
    batches = make_batches(case, quick, device)
    found: dict[str, dict] = {}
    taken |= {
        "inputs": case.inputs(quick),
        "parameters": sum(p.numel() for p in setting.start.parameters()),
        "optimizer": case.optimizer.__name__,
        "compared_with": "eager" if "eager" in names else names[0],
        "tolerance": TOLERANCE[setting.precision],
        "variants": found,
    }
    alive = {}
    for name in names:
        progress(f"    {name}")
        found[name], variant = prepare(name, setting, batches)
        if variant is not None:
            alive[name] = variant
    check(taken)
    progress(f"    timing {len(alive)} variants")
    turns = itertools.cycle(batches)
    runs = {n: lambda step=v.step: step(*next(turns)) for n, v in alive.items()}
    rounds = QUICK_ROUNDS if quick else ROUNDS
    for name, times in time_rounds(runs, device, rounds, budget).items():
        found[name] |= times
    for variant in alive.values():
        variant.close()


def check(taken: dict) -> None:
    """The first losses of each variant against the reference's, from equal weights and batches."""
    reference = taken["variants"].get(taken["compared_with"], {}).get("losses")
    for found in taken["variants"].values():
        if reference and "losses" in found:
            apart = difference(found["losses"], reference)
            found |= {"difference": apart, "agrees": apart <= taken["tolerance"]}


def all_good(cases: list[dict]) -> bool:
    """No variant of ours failed, and none has other losses than the reference."""
    rows = [row for case in cases for row in case["variants"].items()]
    ours = [found for name, found in rows if name.startswith(("TrainStep", "ours"))]
    agree = all(found.get("agrees", True) for _, found in rows)
    return agree and not any("failed" in found for found in ours)
