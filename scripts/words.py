"""The words and identifiers that HACKING.md rules out, in Rust sources and in Markdown.

Comments and Markdown are read as paragraphs, and names as the words they consist of: a phrase that
is broken over two lines, or joined by underscores, is found as well. Quotations are exempt: block
quotes, code blocks, and text in backticks or double quotes. A string literal of the sources is no
quotation: it is a message, and is checked."""
import re
import subprocess
import sys
from pathlib import PurePath

# Spaces stand for any white space. A phrase has a plainer one: "no client" for "nobody", "the
# caller" for "whoever", "in progress" for "under way", "reads" or "checks" for "looks at".
PHRASES = [
    "nobody", "whoever", "under way", "for ever", "in vain", "now and then", "a moment",
    "let(?:s|ting)? go", "go(?:es|ing)? by", "look(?:s|ed|ing)? at", "answers whether",
    "of (?:its|their) own", "by (?:itself|themselves)",
    "(?:is|are|was|were|be|been|being) told", "tell(?:s|ing)? (?:of|whether|how)",
]
PHRASE = re.compile(r"\b(?:%s)\b" % "|".join(PHRASES).replace(" ", r"[\s\\]+"), re.IGNORECASE)

# Names that the field's terms have replaced.
IDENTIFIERS = set(
    """
    Ban Beat Bell Companion Crew Desk GangBook Gift Hears HeldViews Inspector Lacking LeftOut Lending
    Nonsense OneOf Patience Porter Portion Ran Reign Rests Roll Roomless Several Sheet Shelf Strikes
    Struck Taker Teller Ticking Told Unadopted Unchecked Unheard Unsaid Whose await_fate bar_lease
    belong_to doubt_windows end_walks finds_nothing frames_owed give_way give_way_to has_heard
    has_queues_apart is_pressed keep_in_touch keep_time learn_of_path look_after_boxes
    names_its_keys not_at_once note_readable pass_rest persist_all_ahead read_letters ring_lane
    runs_ahead say_aborts say_rest say_whether_known sends_soon set_quiet set_rest shaking sweep_on
    take_heard take_trouble told_record
    """.split()
)
# Words that name no module.
MODULES = {"again", "more", "rest", "told"}

TOKEN = re.compile(
    r'''//[^\n]*|/\*.*?\*/|\b(?:b|c|br|cr|r)?(?P<hashes>\#*)"(?:(?<=r")|(?<=r\#")|(?<=r\#\#"))'''
    r'''.*?"(?P=hashes)|b?c?"(?:\\.|[^"\\])*"|'(?:\\(?:x..|u\{[^}]*\}|.)|[^'\\\n])\'''',
    re.DOTALL,
)
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"|“[^”]*”")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{4,}")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# What begins a paragraph, after its indentation.
ITEM = re.compile(r"(?:[-*] |\d+\. |#+ |\|)")


def paragraphs(lines):
    """Joins (number, text) pairs to paragraphs, as lists of them; code and quotes are left out."""
    paragraph, is_code = [], False
    for number, text in lines:
        text = text.strip()
        is_fence = text.startswith("```")
        if is_fence:
            is_code = not is_code
        is_prose = bool(text) and not is_fence and not is_code and not text.startswith(">")
        follows = paragraph and paragraph[-1][0] + 1 == number
        follows = follows and paragraph[-1][1][0] not in "#|" and not ITEM.match(text)
        if paragraph and not (is_prose and follows):
            yield paragraph
            paragraph = []
        if is_prose:
            paragraph.append((number, text))
    if paragraph:
        yield paragraph


def in_paragraph(paragraph):
    """(line, phrase) of what is found in a paragraph."""
    text = " ".join(text for _, text in paragraph)
    text = QUOTED.sub(lambda quoted: "`" * len(quoted.group()), text)
    for found in PHRASE.finditer(text):
        end = 0
        for number, part in paragraph:
            end += len(part) + 1
            if found.start() < end:
                yield number, found.group()
                break


def in_markdown(text):
    for paragraph in paragraphs(enumerate(text.split("\n"), 1)):
        yield from in_paragraph(paragraph)


def is_forbidden(name, known={}):
    if name not in known:
        words = " ".join(WORD.findall(name))
        known[name] = name in IDENTIFIERS or bool(PHRASE.search(words))
    return known[name]


def in_rust(text):
    comments, code, end, number = [], [], 0, 1
    for token in TOKEN.finditer(text):
        code.append(text[end : token.start()])
        number += code[-1].count("\n")
        end, part = token.end(), token.group()
        if part.startswith("//"):
            kind = re.match("//[/!]?", part).end()
            if comments and (comments[-1][0] + 1 != number or comments[-1][2] != kind):
                yield from in_comments(comments)
                comments = []
            comments.append((number, part[kind:], kind))
        elif len(part) > 3:
            for found in PHRASE.finditer(part):
                yield number + part.count("\n", 0, found.start()), found.group()
        newlines = part.count("\n")
        code.append("\n" * newlines or " ")
        number += newlines
    yield from in_comments(comments)
    code.append(text[end:])
    code = "".join(code)
    for name in sorted(filter(is_forbidden, set(NAME.findall(code)))):
        for found in re.finditer(rf"\b{name}\b", code):
            yield code.count("\n", 0, found.start()) + 1, name


def in_comments(comments):
    for paragraph in paragraphs((number, text) for number, text, _ in comments):
        yield from in_paragraph(paragraph)


def findings(path):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    found = in_rust(text) if path.endswith(".rs") else in_markdown(text)
    return sorted({(number, " ".join(phrase.replace("\\", " ").split())) for number, phrase in found})


def main():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md", "*.rs"], check=True, capture_output=True, text=True
    )
    bad = 0
    for path in filter(None, listed.stdout.split("\0")):
        if PurePath(path).stem in MODULES:
            print(f"layout: {path} is not named after what it holds")
            bad += 1
        for number, phrase in findings(path):
            print(f"layout: {path}:{number} says {phrase!r}")
            bad += 1
    print(f"layout: {bad} forbidden words or names" if bad else "layout: words ok")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
