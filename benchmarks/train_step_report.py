# SPDX-License-Identifier: BSD-3-Clause
# What a record of bench_train_step.py says: its tables, and which of the project's promises it
# bears out. What wasn't run is left out; what was run and failed is a promise not kept.
import math
import textwrap

from tables import WIDTH, bar, microseconds, number, print_table

OURS, BASES = ("TrainStep", "TrainStep compile"), ("eager", "compile", "hand graph")
PAIRS = [
    (base, ours) for base in ("eager", "eager fused", "compile", "hand graph") for ours in OURS
]
PAIRS += [("eager", "hand graph"), ("eager fused", "hand graph")]  # what the graph alone gains
PAIRS += [("stock", "ours"), ("stock + EMA", "ours + EMA")]

MOST_MICROSECONDS = {
    ("mlp", "TrainStep"): 140,
    ("mlp", "TrainStep compile"): 95,
}
LEAST_RATIOS = {  # (ours, base): time of the base over time of ours
    "mlp": {
        ("TrainStep", "hand graph"): 1.4,
        ("TrainStep", "eager"): 22,
        ("TrainStep compile", "hand graph"): 2,
    },
    "resnet18": {("TrainStep", "eager"): 10, ("TrainStep compile", "eager"): 12},
    "resnet18_cifar": {("TrainStep", "eager"): 10, ("TrainStep compile", "eager"): 12},
    "resnet50": {("TrainStep", "eager"): 4.5},
    "resnet50_b256": {("TrainStep", "compile"): 1.25, ("TrainStep compile", "compile"): 1.25},
    "vgg16_bn_b256": {("TrainStep", "compile"): 1.16, ("TrainStep compile", "compile"): 1.16},
    "vit_b_16_b64": {("TrainStep compile", "compile"): 1.6},
}
NOWHERE_SLOWER = {("TrainStep", "hand graph"): 1, ("TrainStep compile", "compile"): 1}
MOST_MEMORY = {"resnet50": 1.1}  # peak of TrainStep over that of eager
MOST_SECONDS_TO_REPLAY = {"mlp": 2, "resnet50": 8}
LEAST_CHAIN_RATIOS = {"resnet50": 8, "gpt2_124m": 3, "gpt2_774m": 1.9}


# --- numbers --------------------------------------------------------------------------------------


def difference(losses: list[float], reference: list[float]) -> float:
    """The largest relative distance of two runs' losses; inf where one isn't finite."""
    if not all(map(math.isfinite, [*losses, *reference])):
        return math.inf
    pairs = zip(losses, reference, strict=True)
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=0.0)


def median(taken: dict, name: str) -> float | None:
    return taken["variants"].get(name, {}).get("us", {}).get("median")


def ratio(taken: dict, base: str, ours: str) -> float | None:
    above, below = median(taken, base), median(taken, ours)
    return round(above / below, 3) if above and below else None


def ratios_of(key: str, case: str, taken: dict | None) -> dict[str, float]:
    if taken is None:
        return {}
    found = {f"{key}/{case}/{b} over {o}": ratio(taken, b, o) for b, o in PAIRS}
    return {name: value for name, value in found.items() if value is not None}


# --- bars -----------------------------------------------------------------------------------------


def broken(taken: dict, ours: str) -> str | None:
    """Why nothing that was measured of a variant counts; None where it does."""
    found = taken["variants"].get(ours, {})
    if "failed" in found:
        return "failed"
    return None if found.get("agrees", True) else "other losses"


def least(name: str, taken: dict, ours: str, base: str, bound: float) -> list[dict]:
    why, reached = broken(taken, ours), ratio(taken, base, ours)
    title = f"{name}: {base} / {ours}"
    if why:
        return [bar(title, f">= {bound}", why, False)]
    return [] if reached is None else [bar(title, f">= {bound}", reached, reached >= bound)]


def most(title: str, taken: dict, ours: str, reached: float | None, bound: float) -> list[dict]:
    why = broken(taken, ours)
    if why:
        return [bar(title, f"<= {bound}", why, False)]
    return [] if reached is None else [bar(title, f"<= {bound}", reached, reached <= bound)]


def bars_of(case: str, taken: dict) -> list[dict]:
    found, ours = [], taken["variants"].get("TrainStep", {})
    for (which, name), bound in MOST_MICROSECONDS.items():
        if which == case:
            found += most(f"{case}: {name}, µs", taken, name, median(taken, name), bound)
    for (name, base), bound in (NOWHERE_SLOWER | LEAST_RATIOS.get(case, {})).items():
        found += least(case, taken, name, base, bound)
    if case in MOST_MEMORY:
        peaks = [taken["variants"].get(n, {}).get("peak_bytes") for n in ("TrainStep", "eager")]
        reached = round(peaks[0] / peaks[1], 3) if all(peaks) else None
        title = f"{case}: peak memory, TrainStep / eager"
        found += most(title, taken, "TrainStep", reached, MOST_MEMORY[case])
    if case in MOST_SECONDS_TO_REPLAY:
        title = f"{case}: TrainStep's first replay, s"
        bound, reached = MOST_SECONDS_TO_REPLAY[case], ours.get("first_replay_s")
        if "losses" in ours and reached is None:
            return [*found, bar(title, f"<= {bound}", "never", False)]
        found += most(title, taken, "TrainStep", reached, bound)
    return found


def evaluate_bars(record: dict) -> list[dict]:
    """For fp16 on a GPU, at full size, since that is what the promises are for."""
    settings, found = record["settings"], []
    if settings["device"] != "cuda" or settings["precision"] != "fp16" or settings["quick"]:
        return found
    for case, taken in record["cases"].items():
        found += bars_of(case, taken)
    for case, bound in LEAST_CHAIN_RATIOS.items():
        for suffix in ("", " + EMA") if case in record["chain"] else ():
            taken = record["chain"][case]
            found += least(f"{case}, chain", taken, f"ours{suffix}", f"stock{suffix}", bound)
    return found


# --- tables ---------------------------------------------------------------------------------------


def gibibytes(size: int | None) -> str:
    return number(None if size is None else size / 2**30)


def print_notes(taken: dict, reference: str) -> None:
    """What a table's cells have no room for: why a variant failed, whose numbers are others."""
    for name, found in taken["variants"].items():
        if "failed" in found:
            print(textwrap.fill(f"{name} failed: {found['failed']}", WIDTH))
        if not found.get("agrees", True):
            print(f"DISAGREES with {reference} by {found['difference']:.1e}: {name}")


def print_case(case: str, taken: dict) -> None:
    columns = ["variant", "step µs", "x eager", "x graph", "host µs", "GiB", "start s", "replay s"]
    rows = []
    for name, found in taken["variants"].items():
        losses, host = found.get("losses"), found.get("host_us")
        cells = ["failed" if "failed" in found else microseconds(found.get("us"))]
        cells += [number(ratio(taken, base, name)) for base in ("eager", "hand graph")]
        cells += [number(host["median"], 0) if host else "-", gibibytes(found.get("peak_bytes"))]
        cells += [number(found.get(key)) for key in ("start_s", "first_replay_s")]
        cells += [f"{losses[0]:.2f}→{losses[-1]:.2f}" if losses else "-"]
        rows.append([name, *cells])
    shape = " x ".join(map(str, taken["inputs"]))
    title = f"{case}: {taken['optimizer']}, {taken['parameters']:,} parameters, inputs {shape}"
    print_table(title, [*columns, "loss 1→10"], rows)
    print_notes(taken, taken.get("compared_with", "eager"))


def print_chain(case: str, taken: dict) -> None:
    rows = []
    for name, found in taken["variants"].items():
        host = found.get("host_us")
        cells = ["failed" if "failed" in found else microseconds(found.get("us"))]
        cells += [number(host["median"], 0) if host else "-"]
        cells += [number(ratio(taken, name.replace("ours", "stock"), name))]
        rows.append([name, *cells])
    title = f"{case}: unscale, clip, fused AdamW, update; {taken['parameters']:,} parameters"
    print_table(title, ["chain", "µs", "host µs", "x stock"], rows)
    print_notes(taken, "stock")


def print_summary(record: dict) -> None:
    columns = ["step", "x eager", "x compile", "x graph", "kernels", "copies", "GiB", "reserved"]
    rows = []
    for case, taken in record["cases"].items():
        for name, found in taken["variants"].items():
            counts = found.get("kernels") or {}
            copies = counts.get("gpu_memcpy", 0) + counts.get("gpu_memset", 0)
            cells = [number(ratio(taken, base, name)) for base in BASES]
            cells += [str(counts["kernel"]), str(copies)] if counts else ["-", "-"]
            cells += [gibibytes(found.get(key)) for key in ("peak_bytes", "reserved_bytes")]
            rows.append([f"{case} {name}", *cells])
    if rows:
        title = "time of the base over time of the step (below 1: slower)"
        print_table(title, columns, rows)
