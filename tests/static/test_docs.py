# SPDX-License-Identifier: GPL-2.0-or-later
"""Docs: length of lines, links, anchors, images, paths of files that they name, words."""
import re
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from tests.lab.paths import BUILD, ROOT

QEMU = BUILD / "src"
COLUMNS = 100

FENCE = re.compile(r"\s*(```|~~~)")
# Of a line that cannot be broken: one link or address, maybe an item of a list
UNBREAKABLE = re.compile(r"\s*([-*] |\d+\. )?(!?\[[^]]*\]\(\S+\)|\[[^]]+\]: \S+|<?https?://\S+)[.,:;]?")
CODE_SPAN = re.compile(r"(`+)(.+?)\1", re.S)
LINK = re.compile(r"\[([^]]*)\]\(([^)\s]+)\)|^\[[^]]+\]:\s+(\S+)", re.M)
# What is written as a path below one of these is a file or a directory of ours or of QEMU's.
PATH = re.compile(r"(?:accel|configs|docs|hw|include|migration|patches|qapi|scripts|target|tests)/[\w./-]*\w")


@cache
def files():
    """What the repository has, or will have with the next commit, and the directories of that."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, check=True, timeout=60).stdout.split("\n")
    there = {Path(name) for name in listed if name and (ROOT / name).exists()}
    return there | {parent for path in there for parent in path.parents}


def docs():
    return sorted(str(path) for path in files() if path.suffix == ".md")


@cache
def parts(name):
    """[(number, line)] of prose, and of code blocks."""
    both: tuple[list[tuple[int, str]], list[tuple[int, str]]] = [], []
    fenced = False
    for number, line in enumerate((ROOT / name).read_text().split("\n"), 1):
        fence = FENCE.match(line) is not None
        both[fenced or fence].append((number, line))
        fenced ^= fence
    assert not fenced, f"{name}: a code block does not end"
    return both


def text(name):
    return "\n".join(line for _, line in parts(name)[0])


@cache
def anchors(name):
    """As GitHub makes them of headings."""
    found: list[str] = []
    for _, line in parts(name)[0]:
        if heading := re.match(r"#+ +(.*)", line):
            words = re.sub(r"\]\([^)]*\)", "", heading[1]).lower()
            anchor = re.sub(r"[^\w -]", "", words).replace(" ", "-")
            count = sum(re.fullmatch(re.escape(anchor) + r"(-\d+)?", other) is not None for other in found)
            found.append(f"{anchor}-{count}" if count else anchor)
    return found


def test_lines():
    """But for the report, which benches write."""
    assert not [wrong for name in docs() if name != "docs/report.md" for wrong in wrong_lines(name)]


def wrong_lines(name):
    prose, code = parts(name)
    for number, line in prose + code:
        if "\t" in line or line != line.rstrip():
            yield f"{name}:{number}: a tab, or a space at the end"
        if re.search(r"@[A-Z]+@", line):
            yield f"{name}:{number}: something is still to be filled in"
    for number, line in prose:
        if len(line) > COLUMNS and not line.lstrip().startswith("|") and not UNBREAKABLE.fullmatch(line):
            yield f"{name}:{number}: longer than {COLUMNS} columns"


def test_links():
    assert not [wrong for name in docs() for wrong in wrong_links(name)]


def wrong_links(name):
    for _, inline, definition in LINK.findall(CODE_SPAN.sub("", text(name))):
        target = unquote(inline or definition)
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        to = (ROOT / name).parent / path if path else ROOT / name
        to = to.resolve()
        if not to.is_relative_to(ROOT) or (to := to.relative_to(ROOT)) not in files():
            yield f"{name}: {target}: no such file"
        elif anchor and (to.suffix != ".md" or anchor not in anchors(str(to))):
            yield f"{name}: {target}: no such heading"


def test_paths():
    """Ours or QEMU's"""
    wrong = [f"{name}: {span}" for name in docs() for _, span in CODE_SPAN.findall(text(name))
             if PATH.fullmatch(span) and Path(span) not in files() and not (QEMU / span).exists()
             # A program, by the name of its source
             and Path(span + ".c") not in files() and not (QEMU / (span + ".c")).exists()]
    assert not wrong


def test_pictures_are_needed():
    shown = {((ROOT / name).parent / link).resolve() for name in docs()
             for _, link, _ in LINK.findall(text(name)) if link.endswith(".svg")}
    there = {ROOT / path for path in files() if path.suffix in (".svg", ".png", ".jpg")}
    assert there == shown


def test_words():
    """Those that CONTRIBUTING.md takes out of use, in docs, code, patches and their messages; and sentences without a
    subject."""
    table = re.findall(r"^\| [^|]+ \| ([^|]+) \|$", text("CONTRIBUTING.md").partition("| say | not |")[2], re.M)
    words = [word for row in table if not row.startswith("---") for word in row.split(", ")]
    assert len(words) > 20
    bad = re.compile(r"(?i:\b(?:" + "|".join(words) + r")\b)|"
                     r"(?:^|[.] +)(?:# |/?\* +)?(?:Who|What) (?:is|are|has|comes?|waits?)\b(?!.*[?])")
    mine = {"CONTRIBUTING.md", "tests/static/test_docs.py"}
    wrong = []
    for path in sorted(files()):
        # The lab's kernels are named by the content of their patches
        if path.is_relative_to("tests/lab/kernel") or str(path) in mine or not re.search(
                r"[.](md|c|h|py|json|patch)$|SUBJECT$|trace-events$", str(path)):
            continue
        for number, line in enumerate((ROOT / path).read_text().split("\n"), 1):
            # Of a patch, what it says and adds
            if bad.search(line) and not (path.suffix == ".patch" and line[:1] in " -"):
                wrong.append(f"{path}:{number}: {line.strip()[:90]}")
    assert not wrong, "\n".join(wrong)
