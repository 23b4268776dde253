"""Count the sentence patterns that make text hard to read: ``python -m tools.prose``.

Each page of the documentation and each Python file of the product has a count for each pattern, and each file of tests
a count of the sentences that its tests match. ``--check`` compares the counts with the record in ``tools/prose.json``
and exits with 1 if a count has risen. ``--record`` does the same, and writes the current counts if none has risen. A
new file may have the counts of deleted files, because a file may be moved. ``--record --force FILE`` accepts all counts
of a new or renamed file.

The tool searches prose only, not code blocks, inline code, comments and link targets.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tools/prose.json"
#: The number of words from which on a sentence is long.
LONG_SENTENCE = 31
_VERB = (
    r"(?:is|are|was|were|has|have|had|can|could|may|might|must|will|would|should|does|did|do|goes|comes?|came|needs?|takes?|"
    r"holds?|stands?|makes?|made|says?|happens?|happened|lies|reads?|writes?|runs?|asks?|uses?|works?|knows?)"
)
#: The patterns of prose, by name.
PATTERNS: Mapping[str, re.Pattern[str]] = {
    "free relative clause": re.compile(
        rf"\b(?:what|who|whoever|whatever) (?:{_VERB}\b|(?:it|they|we|you|he|she|this|that|these|the \w+|an? \w+) )",
        re.I,
    ),
    "reporting passive": re.compile(
        r"\b(?:is|are|was|were|be|been|being) (?:not |never |then |also |\w+ly )?(?:told|said|asked|let|given|taken)\b",
        re.I,
    ),
    "begin or end": re.compile(r"\b(?:begins?|began|begun|beginning|ends?|ended|ending)\b", re.I),
    "bare pronoun": re.compile(r"\b(?:one that|those (?:that|who|of|which)|that of)\b", re.I),
    "inversion": re.compile(
        r"(?:^|[.:;] )(?:So (?:it|they|that) (?:is|are|does|do)|Where there (?:is|are)|Of [^,.]{1,40},)", re.M
    ),
    "avoided word": re.compile(
        r"\b(?:anew|any more|meanwhile|besides|for ever|but for|at the least|of (?:ours|theirs|its own))\b", re.I
    ),
}
#: The limits of patterns per 1,000 words of documentation. A docstring counts if it has one of these patterns.
BARS: Mapping[str, float] = {"free relative clause": 1, "reporting passive": 0.4, "begin or end": 0.5}
DOCSTRINGS_PERCENT = 5
VERBS_PERCENT = 80
#: First words of a function's docstring that are not verbs.
_NOT_A_VERB = re.compile(
    r"(?:The|An?|Whether|What|Where|How|Who|Whose|Why|When|Which|Those|These|That|This|There|One|All|As|No|Nothing|Every\w*|"
    r"Each|Its|Their|Called|From|About|For|At|Of|So|Without|Never|Another|Something|Like|\w*s)\b"
)
_CODE = re.compile(r"```.*?```|^    .*$|`[^`]*`|<!--.*?-->", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\([^)]*\)")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n\s*[-*|#]|\|")
_THREE_WORDS = re.compile(r"[A-Za-z]+(?: [A-Za-z]+){2,}")
_CONTINUED_LITERAL = re.compile(r'"\s*\n\s*[rf]*"')


def count(text: str) -> Counter[str]:
    """Count each pattern in a text in Markdown."""
    prose = _LINK.sub("]", _CODE.sub(" X ", text))
    found = Counter({name: len(pattern.findall(prose)) for name, pattern in PATTERNS.items()})
    found["long sentence"] = sum(len(sentence.split()) >= LONG_SENTENCE for sentence in _SENTENCE.split(prose))
    return +found


def count_docstrings(source: str) -> Counter[str]:
    """Count each pattern in the docstrings of a Python file, and functions whose docstring starts without a verb."""
    found: Counter[str] = Counter()
    for node, text in docstrings(source):
        found += count(text)
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        found["docstring without a verb"] += is_function and _NOT_A_VERB.match(text) is not None
    return +found


def count_matches(source: str, messages: str, quoted: str) -> Counter[str]:
    """Count arguments ``match`` in a test file with three words that are in ``messages`` and not in ``quoted``."""
    found: Counter[str] = Counter()
    for node in ast.walk(ast.parse(source)):
        for keyword in node.keywords if isinstance(node, ast.Call) else []:
            if keyword.arg == "match":
                runs = _THREE_WORDS.findall(ast.unparse(keyword.value).replace("\\", ""))
                found["sentence in a match"] += any(run in messages and run not in quoted for run in runs)
    return +found


def _flat(paths: list[Path]) -> str:
    """Return the text of files in one line, with string literals joined that span several lines."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    return " ".join(_CONTINUED_LITERAL.sub("", text).split())


def docstrings(source: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield each documented node of a Python file with its docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node, text


def counts(root: Path) -> dict[str, Counter[str]]:
    """Return the counts of each file of a checkout by its path, without files that have no pattern."""
    matches = partial(count_matches, messages=_flat(modules(root)), quoted=_flat(pages(root)))
    counters: dict[Path, Callable[[str], Counter[str]]] = {
        **dict.fromkeys(pages(root), count),
        **dict.fromkeys(modules(root), count_docstrings),
        **dict.fromkeys(root.glob("tests/**/*.py"), matches),
    }
    found = {
        path.relative_to(root).as_posix(): counter(path.read_text(encoding="utf-8"))
        for path, counter in sorted(counters.items())
    }
    return {path: counted for path, counted in found.items() if counted}


def totals(root: Path) -> Iterator[str]:
    """Yield the lines of the summary: each pattern per 1,000 words, and the shares of docstrings, with their limits."""
    texts = [path.read_text(encoding="utf-8") for path in pages(root)]
    words = sum(len(_CODE.sub(" ", text).split()) for text in texts)
    found: Counter[str] = Counter()
    for text in texts:
        found += count(text)
    yield f"{words:,} words of documentation, without code; for each 1,000 words:"
    for pattern, number in found.most_common():
        bar = f"at most {BARS[pattern]}" if pattern in BARS else ""
        yield f"{number * 1000 / words:8.2f}  {pattern:22} {bar}".rstrip()
    nodes = [each for path in modules(root) for each in docstrings(path.read_text(encoding="utf-8"))]
    functions = [text for node, text in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    shown = sum(any(count(text)[pattern] for pattern in BARS) for _, text in nodes)
    verbs = sum(_NOT_A_VERB.match(text) is None for text in functions)
    yield f"{len(nodes):,} docstrings:"
    yield f"{shown * 100 / len(nodes):7.1f} %  with one of these patterns, at most {DOCSTRINGS_PERCENT} %"
    yield f"{verbs * 100 / len(functions):7.1f} %  of functions start with a verb, at least {VERBS_PERCENT} %"


def pages(root: Path) -> list[Path]:
    """Return the counted pages: all but the changelog."""
    return sorted(path for path in [*root.glob("*.md"), *root.glob("docs/**/*.md")] if path.name != "CHANGELOG.md")


def modules(root: Path) -> list[Path]:
    """Return the modules of the product."""
    return sorted(path for package in ("tms_core", "janitor") for path in root.glob(f"{package}/**/*.py"))


def risen(today: Mapping[str, Mapping[str, int]], recorded: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a line for each count that has risen since it was recorded.

    A file without a record may have the counts of deleted files, because a file may be moved.
    """
    gone: Counter[str] = Counter()
    for path in recorded.keys() - today.keys():
        gone.update(recorded[path])
    lines = []
    for path, counted in today.items():
        for pattern, number in counted.items():
            allowed = recorded[path].get(pattern, 0) if path in recorded else min(number, gone[pattern])
            if path not in recorded:
                gone[pattern] -= allowed
            if number > allowed:
                lines.append(f"{path}: {pattern}: {number}, at most {allowed}")
    return lines


def main(arguments: list[str]) -> int:
    """Print the totals; with ``--check`` compare the counts with the record, with ``--record`` write it."""
    parser = argparse.ArgumentParser(description="Count sentence patterns in documentation and docstrings.")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a count has risen")
    parser.add_argument("--record", action="store_true", help="record the current counts if none has risen")
    parser.add_argument("--force", metavar="FILE", action="append", default=[], help="a new or renamed file to record")
    options = parser.parse_args(arguments)
    today, recorded = counts(ROOT), json.loads(RECORD.read_text(encoding="utf-8"))
    if options.check or options.record:
        forced = set(options.force) - recorded.keys() if options.record else set()
        lines_risen = risen({path: counted for path, counted in today.items() if path not in forced}, recorded)
        for line in lines_risen:
            print(line)
        if lines_risen:
            return 1
    if options.record:
        lines = ",\n".join(
            f"  {json.dumps(path)}: {json.dumps(counted, sort_keys=True)}" for path, counted in today.items()
        )
        RECORD.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    if options.check:
        return 0
    for line in totals(ROOT):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
