# SPDX-License-Identifier: BSD-3-Clause
# What a record of bench_optim.py says: its tables, and which of the project's promises it bears
# out. A promise that the record holds no measurement for is left out, never assumed.
from tables import bar, microseconds, print_table

TIMERS = ("single", "b2b", "graph", "host")

# The bars hold for AdamW in fp32; each is a least ratio of torch's fused over ours (gather).
CUDA_BARS = {
    "single": {"mnist_mlp": 6, "resnet50": 3.5, "vit_b_16": 1.6, "gpt2_124m": 1.6},
    "b2b": {"mnist_mlp": 6, "resnet50": 2.8, "vit_b_16": 1.25, "gpt2_124m": 1.25},
    "graph": {"resnet50": 1.4, "gpt2_124m": 1.2},
    "host": {"resnet50": 4, "thousand": 4},
}
TWO_CORE_CPU_BARS = {"b2b": {"cpu_25m": 1.0, "cpu_500x1000": 3.0}}
BANDWIDTH_BARS = {"gather": 92, "flat update": 95}  # % of copy, from LARGE parameters up
LARGE = 100_000_000
# LARS in fp32, against timm's or a for-loop like it; 28 bytes a parameter are what it must move.
LARS_RATIO = ("resnet50", "graph", 20)
LARS_BANDWIDTH = {"vit_b_16": 80, "gpt2_124m": 80}
LARS_KERNELS = 3


def speed_bars(record: dict) -> list[dict]:
    settings = record["settings"]
    table = CUDA_BARS if settings["device"] == "cuda" else TWO_CORE_CPU_BARS
    if settings["device"] == "cpu" and settings["threads"] != 2:
        return []
    found = []
    for timer, wanted in table.items():
        for case, least in wanted.items():
            reached = record["ratios"].get(f"{record['key']}/{case}/{timer}/gather")
            if reached is not None:
                name = f"{case}: fused / ours, {timer}"
                found.append(bar(name, f">= {least}", reached, reached >= least))
    for case, taken in record["cases"].items():
        for variant, least in BANDWIDTH_BARS.items():
            percent = taken.get("percent_of_copy", {}).get(variant)
            if percent is not None and taken["parameters"] >= LARGE:
                name = f"{case}: % of copy bandwidth, {variant}"
                found.append(bar(name, f">= {least}", percent, percent >= least))
    return found


def memory_bars(record: dict) -> list[dict]:
    found = []
    for case, taken in record["cases"].items():
        for share, peaks in taken.get("memory", {}).items():
            for when in ("first_step", "later_step"):
                reached = round(peaks["gather"][when] / peaks["fused"][when], 4)
                name = f"{case}: peak memory, ours / fused, {share}, {when.replace('_', ' ')}"
                found.append(bar(name, "<= 1", reached, reached <= 1))
        if taken.get("padding_fraction") is not None and case == "resnet50":
            share = round(taken["padding_fraction"], 5)
            found.append(bar(f"{case}: padding of regions", "< 0.01", share, share < 0.01))
        count = taken.get("launches", {}).get("gather", {}).get("kernel")
        if count:
            found.append(bar(f"{case}: kernels of one step", "<= 1", count, count <= 1))
    return found


def lars_bars(record: dict) -> list[dict]:
    case, timer, least = LARS_RATIO
    found = []
    reached = record["ratios"].get(f"{record['key']}/{case}/{timer}/gather")
    if reached is not None:
        name = f"{case}: {record['reference']} / ours, {timer}"
        found.append(bar(name, f">= {least}", reached, reached >= least))
    us = record["cases"].get(case, {}).get("us", {}).get(timer, {})
    if "timm plain" in us:
        reached = round(us["timm plain"]["median"] / us["gather"]["median"], 3)
        name = f"{case}: timm plain (every tensor has a ratio) / ours, {timer}"
        found.append(bar(name, f">= {least}", reached, reached >= least))
    for case, taken in record["cases"].items():
        percent = taken.get("percent_of_copy", {}).get("gather")
        if percent is not None and case in LARS_BANDWIDTH:
            least = LARS_BANDWIDTH[case]
            name = f"{case}: % of copy bandwidth, gather"
            found.append(bar(name, f">= {least}", percent, percent >= least))
        count = taken.get("launches", {}).get("gather", {}).get("kernel")
        if count:
            holds = count <= LARS_KERNELS
            found.append(bar(f"{case}: kernels of one step", f"<= {LARS_KERNELS}", count, holds))
    return found


def evaluate_bars(record: dict) -> list[dict]:
    """What could be measured here of what the project promises; nothing is assumed."""
    if record["key"] == "cuda/lars/float32":
        return lars_bars(record)
    if record["key"].split("/")[1:] != ["adamw", "float32"]:
        return []
    return speed_bars(record) + memory_bars(record)


# --- tables ---------------------------------------------------------------------------------------


def print_case(case: str, record: dict) -> None:
    names = list(dict.fromkeys(n for found in record["us"].values() for n in found))
    shown = [t for t in TIMERS if t in record["us"]]
    columns = ["step", *(f"{t} µs" for t in shown), *(f"x {t}" for t in shown), "% copy"]
    rows = []
    for n in names:
        ratios = [record["ratios"][t].get(n) for t in shown]
        copy = record.get("percent_of_copy", {}).get(n)
        cells = [microseconds(record["us"][t].get(n)) for t in shown]
        cells += ["-" if r is None else f"{r:.2f}" for r in ratios]
        rows.append([n, *cells, "-" if copy is None else f"{copy:.0f}"])
    title = f"{case}: {record['tensors']} tensors, {record['parameters']:,} parameters"
    print_table(f"{title}, {record['groups']} group(s)", columns, rows)
    check = record["check"]
    differences = ", ".join(f"{n} {d:.1e}" for n, d in check["largest_difference"].items())
    print(f"largest difference after {check['steps']} steps: {differences}")
    for name in (n for n, good in check["agrees"].items() if not good):
        print(f"DISAGREES beyond {check['tolerance']}: {name}")
    for share, peaks in record.get("memory", {}).items():
        for when in ("first_step", "later_step"):
            parts = [f"{n} {p[when] / 2**20:.2f}" for n, p in peaks.items()]
            print(f"peak memory, MiB ({share}, {when.replace('_', ' ')}): {', '.join(parts)}")
    print(*record["notes"], sep="\n", end="\n" if record["notes"] else "")


def summary_rows(case: str, record: dict, shown: list[str]) -> list[list[str]]:
    rows = []
    for name in ("gather", "flat"):
        ratios = [record["ratios"].get(t, {}).get(name) for t in shown]
        kernels = record.get("launches", {}).get(name, {}).get("kernel", "-")
        copy = record.get("percent_of_copy", {}).get(name, "-")
        cells = ["-" if r is None else f"{r:.2f}" for r in ratios]
        rows.append([f"{case} {name}", *cells, str(copy), str(kernels)])
    return rows


def print_summary(record: dict) -> None:
    cases = record["cases"]
    shown = [t for t in TIMERS if any(t in c["us"] for c in cases.values())]
    rows = [row for case, taken in cases.items() for row in summary_rows(case, taken, shown)]
    title = f"{record['reference']} / ours (below 1: slower)"
    print_table(title, ["step", *shown, "% copy", "kernels"], rows)
    for case, taken in cases.items():
        if taken.get("launches"):
            counts = (f"{n} {c['kernel']}" for n, c in taken["launches"].items())
            print(f"{case}: kernels of one step: {', '.join(counts)}")
