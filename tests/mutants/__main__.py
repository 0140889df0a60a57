"""`make mutants`: break the code in one place, run one named test, and demand that it fails.

A mutant is one replacement in one file of a copy of `src`; the checkout is never touched. Its test must pass on the
unbroken copy (else its failure would say nothing) and fail on the broken one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]


def run_tests(tests: list[str], source: Path) -> tuple[int, str]:
    """Exit code and output of pytest on some tests, with the package taken from `source`."""
    environment = os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout + done.stderr


def break_copy(mutant: Mutant, source: Path) -> Path:
    """Apply one mutant to the copy; returns the file, to be restored by the caller."""
    path = source / "crossfade" / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.file} holds {text.count(mutant.old)} times: {mutant.old!r}")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    return path


def main() -> int:
    """Run all mutants, or those whose name contains a word; the exit code is the number of survivors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="only mutants whose name contains this")
    word = parser.parse_args().word
    chosen = [mutant for mutant in MUTANTS if word in mutant.name]
    if not chosen:
        raise SystemExit(f"no mutant is called like {word!r}")
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        shutil.copytree(ROOT / "src" / "crossfade", source / "crossfade")
        tests = sorted({mutant.test for mutant in chosen})
        code, output = run_tests(tests, source)
        if code != 0:
            print(output[-4000:])
            raise SystemExit("the tests fail on the unbroken code, so they cannot judge mutants")
        print(f"{len(tests)} tests pass on the unbroken code")
        for mutant in chosen:
            original = (source / "crossfade" / mutant.file).read_text(encoding="utf-8")
            path = break_copy(mutant, source)
            begin = time.perf_counter()
            code, output = run_tests([mutant.test], source)
            path.write_text(original, encoding="utf-8")
            # 1: a test failed. Anything else (collection error, no test) does not count as noticing.
            killed = code == 1
            if not killed:
                survivors.append(mutant.name)
                print(output[-2000:])
            print(
                f"{'killed  ' if killed else 'SURVIVED'} {mutant.name:<40} {time.perf_counter() - begin:5.1f} s  {mutant.test}"
            )
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    return len(survivors)


if __name__ == "__main__":
    raise SystemExit(main())
