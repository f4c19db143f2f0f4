"""Run many random programs on some numbers of ranks, and shrink the first of each that fails.

    python tests/fuzz.py --programs 10000 --ranks 1 2 3 4 --seed 5
    python tests/fuzz.py --programs 2000 --ranks 1 2 3 --seed 5 --falling-back --compiled all some
    python tests/fuzz.py --programs 500 --ranks 1 2 3 --seed 5 --diagnose
    python tests/fuzz.py --programs 300 --ranks 1 2 3 --seed 5 --devices --compiled all some

This process draws the programs, and ranks are started to run them in batches; so are the smaller programs that the search
for the smallest tries. So no rank draws or searches while others wait, and what hangs or crashes ends its job alone. The
same seed always draws the same programs.
"""

import argparse
import os
import re
import secrets
import sys
import tempfile
import time
import zlib
from pathlib import Path

import launch
from machine_load import slowdown
from programs.drawing import drawn
from programs.simplifying import simpler
from programs.steps import script

HERE = Path(__file__).parent
BATCH = 250
PATIENCE = 30.0
"""Seconds for one program on a quiet machine; one that hangs where it is to be made smaller gets a third."""


class Fuzz:
    """Programs of one number of ranks."""

    def __init__(self, ranks, count, seed, before, search, compiled, falling_back, diagnose, devices):
        self.ranks, self.count, self.seed, self.before, self.search = ranks, count, seed, before, search
        self.compiled, self.falling_back, self.diagnose, self.devices = compiled, falling_back, diagnose, devices
        self.digest, self.start = 0, time.monotonic()

    def run(self):
        """Run all programs; return whether they pass."""
        done, number = 0, 0
        while done < self.count:
            size, seed = min(BATCH, self.count - done), self.seed * 1_000_003 + number
            programs = drawn(self.ranks, size, seed, self.compiled, self.falling_back)
            self.digest = zlib.crc32("".join(map(repr, programs)).encode(), self.digest)
            outcome, place = self.job(programs, PATIENCE)
            if outcome.returncode:
                self.fail(programs[place], done + place, outcome)
                return False
            done, number = done + size, number + 1
            self.say(f"{done} of {self.count} programs pass" + (f", {outcome.stdout.strip()}" if outcome.stdout else ""))
        return True

    def say(self, text):
        seconds = time.monotonic() - self.start
        print(f"{self.ranks} ranks: {text} ({seconds:.0f} s, drawn {self.digest:08x})", flush=True)

    def job(self, programs, patience):
        """Start the ranks on some programs; return how that ended, and at which program."""
        patience *= slowdown()
        with tempfile.TemporaryDirectory(prefix="mpiad-fuzz-") as folder:
            file = Path(folder) / "programs"
            file.write_text("".join(f"{program!r}\n" for program in programs))
            arguments = [str(HERE / "programs" / "batch.py"), "--limit", str(patience)]
            arguments += [*["--diagnose"] * self.diagnose, *["--devices"] * self.devices, str(file), *self.before]
            path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
            limit = patience * (len(programs) + 1)
            environment = {"PYTHONPATH": path, "MPIAD_CACHE": folder}  # the user's cache keeps the user's kernels
            outcome = launch.run_captured(self.ranks, arguments, limit=limit, env=environment)
            at = Path(f"{file}.at")
            return outcome, int(at.read_text()) if at.exists() else 0

    def fail(self, program, place, outcome):
        """Report a program that failed, as small as can be found."""
        self.say(f"program {place} of {self.count} FAILED")
        print(f"{outcome.stdout}{outcome.stderr}{outcome.reports}", flush=True)
        alone, _ = self.job([program], PATIENCE)
        if not alone.returncode:
            print(f"It passes by itself: what it meets was left by the programs before it.\n\n{script(program)}")
            return
        program, outcome = self.simplified(program, alone)
        self.say("the smallest program found")
        print(f"\n{script(program)}\n{outcome.stdout}{outcome.stderr}{outcome.reports}", flush=True)

    def simplified(self, program, failure):
        """Return the smallest failing program that is found in time, and how its job ended."""
        print("looking for the smallest such program", flush=True)
        until = time.monotonic() + self.search
        candidates, kind = simpler(program), kind_of(failure)
        while candidates and time.monotonic() < until:
            outcome, place = self.job(candidates, PATIENCE / 3)
            if not outcome.returncode:
                break
            if kind_of(outcome) == kind:
                program, failure, candidates = candidates[place], outcome, simpler(candidates[place])
            else:  # this candidate is invalid, or meets something else
                candidates = candidates[place + 1 :]
        return program, failure


def kind_of(outcome):
    """Return the name of the first exception that a failed job shows, "" for a job without one, such as one that hangs."""
    found = re.search(r"^(?:\w+\.)*(\w*(?:Error|Exception|Interrupt)):", outcome.stderr, re.MULTILINE)
    return found[1] if found else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=10_000, help="how many, divided among the numbers of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--seed", type=int, help="another one at each run by default")
    parser.add_argument("--shrink", type=float, default=300.0, help="seconds to look for a smaller program; 0: not")
    parser.add_argument(
        "--compiled", nargs="+", default=["none", "all", "some"], choices=["none", "all", "some"],
        help="on which ranks programs are jitted, in turn",
    )  # fmt: skip
    parser.add_argument(
        "--falling-back", action="store_true", help="a rank leaves its trace in each: with --compiled all some"
    )
    parser.add_argument("--diagnose", action="store_true", help="look for false alarms of mpiad.testing.diagnose")
    parser.add_argument("--devices", action="store_true", help="all arrays on the stand-in for a device")
    parser.add_argument("--before", nargs=1, default=[], help="a Python file that every rank runs first")
    options = parser.parse_args()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    numbers = " ".join(map(str, options.ranks))
    print(f"fuzz: {options.programs} programs on {numbers} ranks, seed {seed}", flush=True)
    shares = [len(range(k, options.programs, len(options.ranks))) for k in range(len(options.ranks))]
    rest = seed, options.before, options.shrink, options.compiled, options.falling_back, options.diagnose, options.devices
    runs = [Fuzz(*each, *rest) for each in zip(options.ranks, shares)]
    failed = [run.ranks for run in runs if not run.run()]
    if failed:
        print(f"fuzz: FAILED on {failed} ranks; again: --seed {seed} --programs {options.programs} --ranks {numbers}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
