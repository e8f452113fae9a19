"""python -m tests.csrc [SUBJECT …] [--cases N] [--seed S] [--record FILE]: fuzz the planner.

Runs N cases of each subject on the host, and says which seed draws them again. Exits with an
AssertionError that shows a small failing case.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import secrets
import sys
import tempfile
import time

from tqdm import tqdm

from tests.csrc.fuzz import fuzz
from tests.csrc.plan import Tiles
from tests.csrc.route import Router

SUBJECTS = {"route.cuh": Router, "plan.cuh": Tiles}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("subjects", nargs="*", default=list(SUBJECTS), metavar="SUBJECT")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None, help="default: another in every run")
    parser.add_argument("--record", type=pathlib.Path, metavar="FILE", help="add a line of JSON")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    for name in options.subjects:
        print(f"{name}: {options.cases} cases of seed {seed}", flush=True)
        started = time.monotonic()
        with (
            tempfile.TemporaryDirectory() as folder,
            tqdm(total=options.cases, disable=None) as bar,
        ):
            fuzz(SUBJECTS[name](pathlib.Path(folder)), options.cases, seed, bar.update)
        seconds = round(time.monotonic() - started)
        print(f"{name}: no difference, {seconds} s", flush=True)
        if options.record is not None:
            line = {
                "what": f"{name} on the host beside its oracle",
                "cases": options.cases,
                "failed": 0,
                "seed": seed,
                "seconds": seconds,
                "command": " ".join(["python -m tests.csrc", *sys.argv[1:]]),
            }
            with options.record.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
