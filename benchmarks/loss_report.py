# SPDX-License-Identifier: BSD-3-Clause
# What a record of bench_loss.py says: its tables, and which of the project's promises it bears out.
from optim_report import TIMERS
from tables import bar, microseconds, print_table

# Least ratios of torch's time over ours, in a graph, and the largest of our peak over torch's.
SPEED_BARS = {"200x10": 1.0, "256x1000": 1.0, "8192x50257": 1.5}
HALF_ONLY = ("8192x50257",)
MEMORY_BARS = {"8192x50257": 0.5}


def evaluate_bars(record: dict) -> list[dict]:
    """What could be measured here of what the project promises; nothing is assumed."""
    found = []
    for case, taken in record["cases"].items():
        device, dtype, shape, _ = case.split("/")
        if device != "cuda" or (shape in HALF_ONLY and dtype == "float32"):
            continue
        least, reached = SPEED_BARS.get(shape), taken["ratios"].get("graph")
        if least is not None and reached is not None:
            found.append(bar(f"{case}: graph", f">= {least}", reached, reached >= least))
        most, peaks = MEMORY_BARS.get(shape), taken["peak_bytes"]
        if most is not None:
            share = round(peaks["ours"] / peaks["torch"], 4)
            found.append(bar(f"{case}: peak memory", f"<= {most}", share, share <= most))
    return found


def print_case(case: str, record: dict) -> None:
    shown = [t for t in TIMERS if t in record["us"]]
    columns = ["µs", "torch", "ours", "torch / ours"]
    rows = []
    for timer in shown:
        cells = [microseconds(record["us"][timer].get(name)) for name in ("torch", "ours")]
        ratio = record["ratios"].get(timer)
        rows.append([timer, *cells, "-" if ratio is None else f"{ratio:.2f}"])
    print_table(f"{case}: forward + backward", columns, rows)
    for name, peak in record.get("peak_bytes", {}).items():
        print(f"peak memory above the logits, {name}: {peak / 2**20:.2f} MiB")
    found = record["check"]
    print(f"difference in roundings: loss {found['loss']}, gradient {found['gradient']}")
    if not found["torch_is_finite"]:
        print("torch's own loss isn't finite")
    if not found["agrees"]:
        print(f"DISAGREES beyond {found['tolerance']}")
    print(*record["notes"], sep="\n", end="\n" if record["notes"] else "")


def print_summary(record: dict) -> None:
    cases = record["cases"]
    shown = [t for t in TIMERS if any(t in c["us"] for c in cases.values())]
    rows = []
    for case, taken in cases.items():
        ratios = [taken["ratios"].get(t) for t in shown]
        peaks = taken.get("peak_bytes")
        share = f"{peaks['ours'] / peaks['torch']:.3f}" if peaks else "-"
        rows.append([case, *("-" if r is None else f"{r:.2f}" for r in ratios), share])
    title = "torch's time / ours (below 1: slower); our peak memory / torch's"
    print_table(title, ["case", *shown, "memory"], rows)
