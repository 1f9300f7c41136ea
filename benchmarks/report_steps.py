# SPDX-License-Identifier: BSD-3-Clause
# Prints the README's tables of whole training steps and of the loss from the records of
# bench_train_step.py and bench_loss.py; --write puts them there.
import argparse
import json
import re
import sys

import report

RESULTS = report.ROOT / "benchmarks" / "results"
STEPS = (RESULTS / "train_step_h200.json", RESULTS / "train_step_mlp_h200.json")
LOSS = RESULTS / "loss_h200.json"
BEGIN, END = "<!-- step table -->", "<!-- /step table -->"
VARIANTS = ("eager", "hand graph", "TrainStep", "TrainStep compile")


def cell(variants: dict, name: str) -> str:
    us = variants.get(name, {}).get("us")
    if not us:
        return "–"
    spread = 50 * (us["q3"] - us["q1"]) / us["median"]
    return f"{us['median']:,.{0 if us['median'] >= 100 else 1}f} ±{spread:.0f} %"


def step_rows(record: dict) -> list[list[str]]:
    when = record["environment"]["date"][11:16]
    return [
        [f"{case} ({when})", *(cell(taken["variants"], name) for name in VARIANTS)]
        for case, taken in record["cases"].items()
    ]


def loss_rows(record: dict) -> list[list[str]]:
    rows = []
    for case, taken in record["cases"].items():
        us, peak = taken["us"].get("graph"), taken["peak_bytes"]
        if us:
            ratio = f"{us['torch']['median'] / us['ours']['median']:.2f}"
            rows.append([case.removeprefix("cuda/"), ratio, f"{peak['ours'] / peak['torch']:.2f}"])
    return rows


def report_steps() -> str:
    steps = [json.loads(path.read_text()) for path in STEPS]
    loss = json.loads(LOSS.read_text())
    e = steps[0]["environment"]
    lines = [
        f"One fp16 training step on one {e['gpu']}, torch {e['torch']}, {e['date'][:10]} (two runs "
        "on hosts of unequal speed, so compare within a row); µs back to back, median ± half the "
        "quartiles' distance. `hand graph` is the whole stock step in one hand-made CUDA graph.",
        "",
    ]
    columns = ["model", *VARIANTS]
    lines += report.table(columns, [row for record in steps for row in step_rows(record)])
    lines += [
        "",
        "`tr.cross_entropy`, forward and backward in a CUDA graph, torch's over ours:",
        "",
    ]
    lines += report.table(["dtype/shape", "time", "peak memory, ours / torch's"], loss_rows(loss))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The README's tables of training steps.")
    parser.add_argument("--write", action="store_true", help="update README.md in place")
    args = parser.parse_args(argv)
    found = report_steps()
    if not args.write:
        return print(found)
    parts = re.fullmatch(f"(.*{BEGIN}\n).*?({END}\n.*)", report.README.read_text(), re.DOTALL)
    if not parts:
        sys.exit(f"README.md has no place for the tables: {BEGIN} and {END}, on lines of their own")
    report.README.write_text(f"{parts[1]}{found}\n{parts[2]}")


if __name__ == "__main__":
    main()
