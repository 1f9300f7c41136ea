# SPDX-License-Identifier: BSD-3-Clause
# The README's table of every kept ratio in which ours is slower, with both times.
from report_records import SPREAD, Record, cell, fold, table

Pair = tuple[dict | None, dict | None]


def times_of(record: Record, key: str) -> Pair:
    """The time above and the time below of a kept ratio, as each benchmark names it: `timer` (of
    torch over ours), `timer/name` (of the reference over it), or `[timer/]name over name`."""
    kept = [*record["cases"].items(), *record.get("chain", {}).items()]
    for case, taken in kept:
        _, mine, rest = f"/{key}".partition(f"/{case}/")
        variants = {name: v.get("us") for name, v in taken.get("variants", {}).items()}
        us = {**taken.get("us", {}), "": variants}
        timer, _, names = rest.rpartition("/")
        if not mine or (rest not in us and timer not in us):
            continue
        if rest in us:
            found = us[rest].get("torch"), us[rest].get("ours")
        elif " over " in names:
            above, below = names.split(" over ")
            found = us[timer].get(above), us[timer].get(below)
        else:
            found = us[timer].get(record.get("reference", "fused")), us[timer].get(names)
        if all(found):
            return found
    return None, None


def losses(records: list[Record]) -> list[str]:
    """Every kept ratio of ours below 1; what a hand-made graph loses is its own."""
    rows = [
        [f"`{key}`", f"{ratio:.2f}", *map(cell, times_of(record, key))]
        for record in records
        for key, ratio in record["ratios"].items()
        if ratio < 1 and not key.endswith("over hand graph")
    ]
    columns = ["device/…/ours", "×", f"theirs, {SPREAD}", "ours"]
    return fold("Every kept ratio below 1: ours is slower", table(columns, rows))[1:]
