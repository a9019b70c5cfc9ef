"""Code blocks of a Markdown page, as a program whose line numbers are the page's."""

from __future__ import annotations

import re
from collections.abc import Iterator

FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,}|~{3,})\s*(?P<language>[\w+-]*)(?P<rest>.*)$")


def blocks(text: str) -> Iterator[tuple[str, int, list[str]]]:
    """Language, line number of the first line (from 1) and lines, without their indent, of every fenced block."""
    opened = None
    for number, line in enumerate(text.splitlines(), start=1):
        if opened is None:
            match = FENCE.match(line)
            if match:
                opened = (match["language"].lower(), number + 1, len(match["indent"]), match["fence"], [])
            continue
        language, first, indent, fence, lines = opened
        if line.strip() == fence:
            yield language, first, lines
            opened = None
        else:
            lines.append(line[indent:] if not line[:indent].strip() else line.lstrip())
    if opened is not None:
        raise ValueError(f"the block that begins on line {opened[1]} is never closed")


def program(text: str) -> str:
    """All python blocks of a page, in order, each on the lines that it has in the page; empty where there is none."""
    lines = [""] * len(text.splitlines())
    found = False
    for language, first, body in blocks(text):
        if language in {"python", "py", "python3", "pycon"}:
            found = True
            lines[first - 1 : first - 1 + len(body)] = body
    return "\n".join(lines) + "\n" if found else ""


def commands(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of every shell command that begins with ``nvalchemi``, prompts and continuation lines joined."""
    for language, first, body in blocks(text):
        if language not in {"console", "bash", "sh", "shell", ""}:
            continue
        joined = "\n".join(body).replace("\\\n", " ")
        for offset, line in enumerate(joined.splitlines()):
            words = line.removeprefix("$ ").strip().split("#")[0].strip()
            words = re.sub(r"^uv run( --extra \S+)* ", "", words)
            if words.startswith("nvalchemi "):
                yield first + offset, words
