# SPDX-License-Identifier: BSD-3-Clause
# A benchmark whose results are known, as a script of its own: --repeat starts it again.
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # an in-place build, if none is installed
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import common


class Planted(common.Benchmark):
    """Cases whose names are the ratios of their first run and of one that is started again."""

    description = "planted"

    def complete(self, args, parser):
        args.cases = ["2.0,2.1", "bad", "4.0,4.0"]

    def run_case(self, case, record):
        if case == "bad":
            raise ValueError("no such\nproblem")
        record["cases"][case] = {"ratio": float(case.split(",")[__name__ == "__main__"])}

    def ratios_of(self, case, record):
        return {case: record["cases"][case]["ratio"]} if case in record["cases"] else {}

    def agrees(self, record):
        return all(taken["ratio"] > 0 for taken in record["cases"].values())


if __name__ == "__main__":
    sys.exit(Planted().main())
