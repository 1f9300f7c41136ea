# SPDX-License-Identifier: BSD-3-Clause
# What a record of bench_data.py says: its tables and ratios.
from tables import microseconds, number, print_table

IN_STEP, FASTEST_STOCK = "DeviceLoader in the step", "DataLoader + TrainStep"
PAIRS = [  # time of the first over that of the second
    *((base, IN_STEP) for base in ("DataLoader + eager", FASTEST_STOCK)),
    ("torchvision on the device + TrainStep", IN_STEP),
    ("DeviceLoader + TrainStep", IN_STEP),
    (FASTEST_STOCK, "prefetch + TrainStep"),
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
