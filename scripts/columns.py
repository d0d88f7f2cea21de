"""Comments and Markdown are at most 100 columns; tables, links and code blocks are exempt, and so
are the generated pages of figures."""
import re
import subprocess
import sys

LIMIT = 100


def is_exempt(text):
    # A table's row, a link's target, or one word that cannot be divided.
    return text.startswith("|") or re.match(r"\[[^\]]*\]: ", text) or len(text.split()) < 3


def long_lines(path):
    """The numbers of the lines that are too long."""
    is_rust = path.endswith(".rs")
    is_code = False
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            line = line.rstrip("\n")
            text = line.strip()
            if is_rust:
                comment = re.match(r"//[/!]?(.*)", text)
                if not comment:
                    is_code = False
                    continue
                text = comment.group(1).strip()
            if text.startswith("```"):
                is_code = not is_code
            elif not is_code and len(line) > LIMIT and not is_exempt(text):
                # A reference to a paper's section may say what it is about.
                if not text.startswith("= "):
                    yield number


def main():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md", "*.rs", ":!docs/figures"], check=True, capture_output=True, text=True
    )
    bad = 0
    for path in filter(None, listed.stdout.split("\0")):
        for number in long_lines(path):
            print(f"layout: {path}:{number} is longer than {LIMIT} columns")
            bad += 1
    print(f"layout: {bad} lines are too long" if bad else "layout: columns ok")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
