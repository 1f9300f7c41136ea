# SPDX-License-Identifier: BSD-3-Clause
# What a record of bench_data.py says: its tables, its ratios and which bars hold.
from tables import bar, microseconds, number, print_table

IN_STEP, FASTEST_STOCK = "DeviceLoader in the step", "DataLoader + TrainStep"
ONE_DRAW = "torchvision, one draw"
PAIRS = [  # time of the first over that of the second
    *((base, IN_STEP) for base in ("DataLoader + eager", FASTEST_STOCK)),
    ("torchvision on the device + TrainStep", IN_STEP),
    ("DeviceLoader + TrainStep", IN_STEP),
    (FASTEST_STOCK, "prefetch + TrainStep"),
]

# Of augmentation: on a GPU as a part of a captured step, on a CPU on one core.
BARS = [
    ("augment/mnist_200", "µs in a graph", "<=", 8),
    ("augment/mnist_200", "torchvision / ours in a graph", ">=", 100),
    ("augment/mnist_8192", "images a second in a graph", ">=", 100e6),
    ("augment/cifar_1024", "% of copy bandwidth", ">=", 50),
    ("cpu/mnist", "torchvision, PIL / ours", ">=", 20),
    ("cpu/mnist", "torchvision, tensors / ours", ">=", 5),
]


def ratios_of(key: str, case: str, taken: dict | None) -> dict[str, float]:
    found = {}
    for timer, times in (taken or {"us": {}})["us"].items():
        if "ours" in times:
            pairs = [(name, "ours") for name in times if name != "ours"]
        else:
            pairs = [pair for pair in PAIRS if times.keys() >= set(pair)]
        for base, ours in pairs:
            ratio = round(times[base]["median"] / times[ours]["median"], 3)
            found[f"{key}/{case}/{timer}/{base} over {ours}"] = ratio
    return found


def reached_of(taken: dict) -> dict[str, float]:
    """What bars are about, by their names."""
    us, images = taken["us"], taken["images"]
    if "one core" in us:
        ours = us["one core"]["ours"]["median"]
        return {f"{n} / ours": t["median"] / ours for n, t in us["one core"].items() if n != "ours"}
    if "graph" not in us:
        return {}
    ours = us["graph"]["ours"]["median"]
    found = {
        "µs in a graph": ours,
        "images a second in a graph": images / ours * 1e6,
        "% of copy bandwidth": taken["percent_of_copy"],
    }
    if ONE_DRAW in us["b2b"]:
        found["torchvision / ours in a graph"] = us["b2b"][ONE_DRAW]["median"] / ours
    return found


def evaluate_bars(record: dict) -> list[dict]:
    """Of a full run, for the cases that it has."""
    if record["settings"]["quick"]:
        return []
    bars = []
    for case, name, sign, bound in BARS:
        taken = record["cases"].get(case)
        value = reached_of(taken).get(name) if taken else None
        if value is not None:
            holds = value <= bound if sign == "<=" else value >= bound
            bars.append(bar(f"{case}: {name}", f"{sign} {bound:g}", round(value, 3), holds))
    return bars


def print_case(case: str, taken: dict) -> None:
    rows = []
    for timer, times in taken["us"].items():
        for name, found in times.items():
            speed = taken["images"] / (found["median"] * 1e-6)
            rows.append([f"{timer}, {name}", microseconds(found), number(speed, 0)])
    title = f"{case}: {taken['images']:,} images"
    print_table(title, ["what", "µs", "images/s"], rows)
    if "percent_of_copy" in taken:
        print(
            f"{taken['percent_of_copy']:.0f} % of a copy that moves as many bytes, in a graph too"
        )
    check = taken.get("check")
    if check and not check["agrees"]:
        print(f"DISAGREES beyond {check['tolerance']}: {check['difference']:.1e}")


def print_summary(record: dict) -> None:
    rows = [[key, f"{ratio:.2f}"] for key, ratio in record["ratios"].items()]
    if rows:
        print_table("time of the first over time of the second", ["ratio", ""], rows)
