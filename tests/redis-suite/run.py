"""Runs units of Redis' test suite against a server and compares the results with expected.txt.

usage: run.py SUITE PORT WORK [UNIT...]

expected.txt:
    run UNIT                 the unit's tests run
      REASON                 why the tests below fail
        - TEST               it runs, and fails
        x TEST               it is not started: it would take minutes, or never end
    not UNIT...              the units do not run
      REASON
"""

import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
# Seconds for one unit, and without any result.
UNIT_TIMEOUT_S = 600
IDLE_TIMEOUT_S = 120


class Unit:
    """What expected.txt says of a unit."""

    def __init__(self, runs):
        self.runs = runs
        self.fails = set()
        self.skipped = set()
        self.has_reason = False


def read_expected(path):
    """The units by name, or an error message with the line's number."""
    units, unit = {}, None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        word, _, rest = text.partition(" ")
        indent = len(line) - len(line.lstrip())
        if indent == 0 and word in ("run", "not") and not units.keys() & set(rest.split()):
            unit = Unit(word == "run")
            units.update((name, unit) for name in rest.split())
        elif indent == 2 and unit:
            unit.has_reason = True
        elif indent == 4 and word in ("-", "x") and unit and unit.runs and unit.has_reason:
            (unit.fails if word == "-" else unit.skipped).add(rest)
        else:
            sys.exit(f"redis-suite: {path}:{number}: not understood: {line}")
    for name, unit in units.items():
        if not unit.runs and not unit.has_reason:
            sys.exit(f"redis-suite: {path}: {name} does not run, and no reason is given")
    return units


def tclsh(suite, arguments, **more):
    return [shutil.which("tclsh"), "tests/test_helper.tcl", *arguments], {"cwd": suite, **more}


def run_unit(suite, port, work, name, unit):
    """Runs one unit; answers the status of each test that has one, and what the suite printed."""
    results, skip = work / "results", work / "skip"
    results.write_text("")
    skip.write_text("".join(f"{name}\t{test}\n" for test in sorted(unit.skipped)))
    environment = dict(os.environ)
    environment["CYCLONE_SUITE_OVERLAY"] = str(HERE.resolve() / "overlay.tcl")
    environment["CYCLONE_SUITE_RESULTS"] = str(results)
    environment["CYCLONE_SUITE_SKIP"] = str(skip)
    command, options = tclsh(
        suite,
        ["--host", "127.0.0.1", "--port", port, "--singledb", "--ignore-encoding", "--ignore-digest"]
        + ["--durable", "--timeout", str(IDLE_TIMEOUT_S), "--single", name],
        env=environment,
    )
    ended = True
    try:
        ran = subprocess.run(
            command, **options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=UNIT_TIMEOUT_S
        )
        output = ran.stdout
        ended = b"The End" in output and b"TIMEOUT" not in output
    except subprocess.TimeoutExpired as expired:
        output, ended = expired.stdout or b"", False
    statuses = {}
    for line in results.read_text().splitlines():
        status, _, test = line.split("\t", 2)
        # A name may occur more than once: one failure makes it fail.
        if statuses.get(test) != "err":
            statuses[test] = status
    return statuses, ended, output.decode(errors="replace")


def judge(name, unit, statuses, ended):
    """What is not as expected.txt says."""
    wrong = []
    if not ended:
        wrong.append(f"{name}: did not come to its end")
    for test, status in statuses.items():
        if status == "err" and test not in unit.fails:
            wrong.append(f"{name}: fails, and is not listed: {test}")
        if status != "err" and test in unit.fails:
            wrong.append(f"{name}: listed as failing, and does not ({status}): {test}")
    for test in sorted((unit.fails | unit.skipped) - statuses.keys()):
        wrong.append(f"{name}: listed, and does not exist: {test}")
    return wrong


def main():
    suite, port, work = pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
    chosen = sys.argv[4:]
    path = HERE / "expected.txt"
    units = read_expected(path)
    command, options = tclsh(suite, ["--list-tests"], env={**os.environ, "CYCLONE_SUITE_OVERLAY": os.devnull})
    there = subprocess.run(command, **options, stdout=subprocess.PIPE, check=True).stdout.decode().split()
    if set(there) != set(units):
        sys.exit(f"redis-suite: units in {path} and in the suite differ: {sorted(set(there) ^ set(units))}")
    logs = os.environ.get("CYCLONE_SUITE_LOGS")
    wrong, totals = [], {"ok": 0, "err": 0, "skip": 0, "ignore": 0}
    for name in there:
        unit = units[name]
        if not unit.runs or (chosen and name not in chosen):
            continue
        statuses, ended, output = run_unit(suite, port, work, name, unit)
        found = judge(name, unit, statuses, ended)
        for status in statuses.values():
            totals[status] += 1
        passed = sum(status == "ok" for status in statuses.values())
        failed = sum(status == "err" for status in statuses.values())
        print(f"{name}: {passed} pass, {failed} fail" + (f", {len(found)} not as listed" if found else ""))
        if found and not logs:
            print(output)
        if logs:
            os.makedirs(logs, exist_ok=True)
            (pathlib.Path(logs) / (name.replace("/", "_") + ".log")).write_text(output)
        wrong += found
        sys.stdout.flush()
    print(
        f"redis-suite: {totals['ok']} tests pass, {totals['err']} fail, {totals['skip']} are not started, "
        f"{totals['ignore']} are not for a server that the suite has not started"
    )
    for line in wrong:
        print(line)
    sys.exit(1 if wrong else 0)


main()
