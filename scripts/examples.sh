#!/usr/bin/env bash
# The check of examples: the header of every crates/*/examples/*.rs prints the command that runs it, and so may documents; each such command
# names a package, an example and features that exist, and no option that `cargo run` does not know. That examples compile is checked by
# the builds with --all-targets.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo metadata --format-version 1 --no-deps --locked | python3 -c '
import json, pathlib, re, shlex, sys

FLAGS = {"--release", "--locked", "--offline", "--quiet", "-q", "--no-default-features"}
packages = {package["name"]: package for package in json.load(sys.stdin)["packages"]}


def has_example(package, example):
    kinds = [(target["name"], target["kind"]) for target in package["targets"]]
    return (example, ["example"]) in kinds


def fault(command):
    """What is wrong with a command, or None; and the example that it names."""
    words = shlex.split(command)
    if words[:2] != ["cargo", "run"]:
        return "is not cargo run", None
    words, chosen, features, example, defaults = words[2:], [], [], None, True
    while words:
        word = words.pop(0)
        if word == "--":
            break
        if word in FLAGS:
            defaults = defaults and word != "--no-default-features"
            continue
        if word not in ("-p", "--package", "--example", "--features", "-F") or not words:
            return f"cargo run does not take {word}", example
        value = words.pop(0)
        if word in ("-p", "--package"):
            chosen.append(value)
        elif word == "--example":
            example = value
        else:
            features += re.split("[, ]+", value)
    if example is None:
        return "names no example", None
    for name in chosen:
        if name not in packages:
            return f"there is no package {name}", example
    # At the root of a workspace without its own package, cargo looks in all members.
    among = [packages[name] for name in chosen] or list(packages.values())
    owners = [package for package in among if has_example(package, example)]
    if len(owners) != 1:
        return f"{len(owners)} of its packages have an example {example}", example
    for feature in features:
        package, _, name = feature.rpartition("/")
        holders = [packages[package]] if package in packages else among
        if not any(name in package["features"] for package in holders):
            return f"no feature {feature}", example
    # What the example itself needs beyond the default features must be asked for.
    for target in owners[0]["targets"]:
        if target["name"] == example:
            needed = set(target.get("required-features", []))
            given = set(features) | (set(owners[0]["features"].get("default", [])) if defaults else set())
            if not needed <= given:
                return f"needs the features {sorted(needed - given)}", example
    return None, example


bad, checked = 0, 0
root = pathlib.Path(".")
examples = sorted(root.glob("crates/*/examples/*.rs")) + sorted(root.glob("crates/*/examples/*/main.rs"))
pages = [root / "README.md", *sorted(root.glob("docs/**/*.md")), *sorted(root.glob("crates/**/*.md"))]
for path in examples + pages:
    is_example = path in examples
    text = path.read_text()
    if is_example:
        text = "\n".join(line[3:] for line in text.splitlines() if line.startswith("//!"))
    commands = [match.strip() for match in re.findall(r"cargo run[^`\n]*--example[^`\n]*", text)]
    name = (path.parent.name if path.name == "main.rs" else path.stem) if is_example else None
    if is_example and not commands:
        print(f"examples: {path}: its header does not print the command that runs it")
        bad += 1
    for command in commands:
        checked += 1
        why, example = fault(command)
        if why is None and is_example and example != name:
            why = f"runs {example}"
        if why:
            print(f"examples: {path}: {command}: {why}")
            bad += 1
print(f"examples: ok ({checked} commands)" if not bad else f"examples: {bad} commands are wrong")
sys.exit(bool(bad))
'
