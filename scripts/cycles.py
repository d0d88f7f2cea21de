#!/usr/bin/env python3
"""Import cycles between the top-level modules of a crate, over `crate::` and `super::` paths.

usage: scripts/cycles.py [--edges]     fails if a cycle has more modules than LIMITS allow

Tests are excluded: `#[cfg(test)] mod tests` and files named tests.rs. A module is counted by the
name of its file or folder directly under src/.
"""
import os
import re
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "crates")
# Modules in the largest cycle that a crate may have.
LIMITS = {"replica": 32, "consensus": 8, "replication": 12, "gateway": 8}


def without_tests_and_comments(text):
    text = re.sub(r"//[^\n]*", "", text)
    tests = text.find("#[cfg(test)]\nmod tests {")
    return text if tests < 0 else text[:tests]


def imported(text, depth):
    """The first names of all paths that begin at the crate's root."""
    prefix = r"\bcrate::"
    if depth:
        prefix = r"(?:\bcrate::|(?<![:\w])" + "super::" * depth + ")"
    for found in re.finditer(prefix + r"(?:\{|(\w+))", text):
        if found.group(1):
            yield found.group(1)
            continue
        # A group: its names at the outermost level.
        level, at, name = 1, found.end(), ""
        while level and at < len(text):
            char = text[at]
            if level == 1 and (char.isalnum() or char == "_"):
                name += char
            else:
                if name:
                    yield name
                name = ""
            if level == 1 and char == ":":
                # The rest of this path belongs to its first name.
                while at < len(text) and text[at] not in ",{}":
                    at += 1
                continue
            level += {"{": 1, "}": -1}.get(char, 0)
            at += 1


def graph(crate):
    source = os.path.join(ROOT, crate, "src")
    files = {}
    for folder, _, names in os.walk(source):
        for name in sorted(names):
            path = os.path.join(folder, name)
            parts = os.path.relpath(path, source)[: -len(".rs")].split(os.sep)
            if name.endswith(".rs") and parts[-1] != "tests":
                files[path] = parts[:-1] if parts[-1] == "mod" else parts
    modules = {parts[0] for parts in files.values()} - {"lib", "main"}
    edges = {module: {} for module in modules}
    for path, parts in files.items():
        if parts[0] not in modules:
            continue
        with open(path, encoding="utf-8") as file:
            text = without_tests_and_comments(file.read())
        for name in imported(text, len(parts)):
            if name in modules and name != parts[0]:
                edges[parts[0]].setdefault(name, set()).add(os.path.relpath(path, source))
    return edges


def cycles(edges):
    """Sets of modules that reach each other, the largest first."""

    def reached(start):
        seen, todo = set(), [start]
        while todo:
            for target in edges[todo.pop()]:
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        return seen

    reach = {module: reached(module) for module in edges}
    sets = {
        frozenset(other for other in reach[module] if module in reach[other]) for module in edges
    }
    return sorted((found for found in sets if len(found) > 1), key=len, reverse=True)


def main():
    bad = False
    for crate, limit in LIMITS.items():
        edges = graph(crate)
        found = cycles(edges)
        largest = found[0] if found else frozenset()
        if len(largest) > limit:
            bad = True
            print(f"layout: {crate}: {len(largest)} modules import each other, at most {limit}:")
            print("  " + ", ".join(sorted(largest)))
        if "--edges" in sys.argv:
            print(crate, len(largest))
            for module in sorted(largest):
                targets = sorted(set(edges[module]) & largest)
                print(f"  {module} -> " + ", ".join(f"{it} {sorted(edges[module][it])}" for it in targets))
    if not bad:
        print("layout: cycles ok")
    sys.exit(bad)


main()
