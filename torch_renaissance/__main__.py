# SPDX-License-Identifier: BSD-3-Clause
"""`python -m torch_renaissance COMMAND`: the sub-commands, each a module with `add_arguments` and
`main`, which is imported when it is called."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys

COMMANDS = {
    ("ab",): (".ab.cli", "compare ways to take a training step of a model"),
    ("data", "show"): (".data.show", "show what a data pipeline yields"),
}


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    for command, (module_name, _) in COMMANDS.items():
        if tuple(words[: len(command)]) == command:
            module = importlib.import_module(module_name, __package__)
            parser = argparse.ArgumentParser(
                prog=" ".join(["python -m torch_renaissance", *command])
            )
            module.add_arguments(parser)
            return module.main(parser.parse_args(words[len(command) :])) or 0
    names = [" ".join(command) for command in COMMANDS]
    lines = [f"  {' '.join(command):<10} {text}" for command, (_, text) in COMMANDS.items()]
    usage = "\n".join(["usage: python -m torch_renaissance COMMAND ...", *lines])
    if words in (["-h"], ["--help"]):
        print(usage)
        return 0
    if words:
        tried = " ".join(words[:2])
        near = difflib.get_close_matches(tried, names, n=1) or difflib.get_close_matches(
            words[0], names, n=1
        )
        meant = f"; did you mean {near[0]!r}?" if near else ""
        print(f"there is no command {words[0]!r}{meant}", file=sys.stderr)
    print(usage, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
