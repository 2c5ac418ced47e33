"""Makes a failing program small: lines go as long as it fails in the same way."""
import re
import time
from typing import Callable, Dict, FrozenSet, List, Set, Tuple

HEADERS = ("if ", "else:", "for ", "while ", "with ")
KEPT = ("import ", "from ", "super().__init__", "@", "CONFIG", "return")


def kind(wrong: List[str]) -> FrozenSet[str]:
    """What sort of difference it is: a reduced program must not fail for another reason."""
    found: Set[str] = set()
    for line in wrong:
        if line.startswith("eager PyTorch"):
            found.add(line)
        elif m := re.match(r"call \d+: (.*)", line):
            what = m.group(1)
            if what.startswith(("raises", "does not raise")):
                found.add(re.sub(r"[\d\W]+", " ", what)[:60])
            else:
                found.add(what.split(":")[0].split(", ")[-1] if ", " in what else what.split()[0])
        elif not line.startswith("the original differs"):
            found.add(re.sub(r"[\d\W]+", " ", re.sub(r"p\d\w*(\.\w+)*", "", line))[:90])
    return frozenset(found)


def same(found: FrozenSet[str], wanted: FrozenSet[str]) -> bool:
    who = lambda k: {x for x in k if x.startswith("eager PyTorch")}
    return bool(found) and who(found) == who(wanted) and found <= wanted


def end_of(lines: List[str], i: int) -> int:
    """The line after the block that begins at line i."""
    width = len(lines[i]) - len(lines[i].lstrip())
    j = i + 1
    while j < len(lines) and (not lines[j].strip() or len(lines[j]) - len(lines[j].lstrip()) > width):
        j += 1
    return j


def joined(lines: List[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def without_unused(source: str) -> str:
    """Drops attributes, functions and classes that nothing names."""
    lines = source.split("\n")
    while True:
        for i, line in enumerate(lines):
            text = line.strip()
            name = None
            if m := re.match(r"self\.(\w+) = ", text):
                name = rf"self\.{m.group(1)}\b"
                start = max(j for j in range(i) if lines[j].startswith("class "))
                rest = lines[start:i] + lines[i + 1:end_of(lines, start)]
            elif m := re.match(r"(?:def|class) (f\d+|B\d+)\b", line):
                name, rest = rf"\b{m.group(1)}\b", lines[:i] + lines[i + 1:]
            if name and not re.search(name, "\n".join(rest)):
                del lines[i:end_of(lines, i)]
                break
        else:
            return joined(lines)


def candidates(source: str) -> Dict[str, str]:
    """Programs with less in them, by what was done. Some are no longer programs."""
    lines = source.split("\n")
    found: List[Tuple[str, str]] = []
    removable = []
    for i, line in enumerate(lines):
        text = line.strip()
        if not text or text.startswith(KEPT) or line.startswith(("class ", "def ")) or text.startswith("def "):
            if text.startswith("return ") and "," in text:
                inner = text[7:]
                opening, closing = (inner[0], inner[-1]) if inner[0] in "[{" else ("", "")
                parts = inner.strip("[]{}").split(", ")
                for k in range(len(parts)):
                    left = ", ".join(parts[:k] + parts[k + 1:])
                    found.append((f"{text} less {k}", joined(lines[:i] + [line[: len(line) - len(line.lstrip())] + f"return {opening}{left}{closing}"] + lines[i + 1:])))
            continue
        j = end_of(lines, i)
        width = line[: len(line) - len(line.lstrip())]
        if text.startswith(HEADERS):
            body = [b[4:] for b in lines[i + 1:j]]
            k = j
            while k < len(lines) and lines[k].strip() == "else:" and lines[k].startswith(width + "else"):
                other = end_of(lines, k)
                found.append((f"other branch {text}", joined(lines[:i] + [b[4:] for b in lines[k + 1:other]] + lines[other:])))
                found.append((f"first branch {text}", joined(lines[:i] + body + lines[other:])))
                k = other
            if k == j and text != "else:":
                found.append((f"body {text}", joined(lines[:i] + body + lines[j:])))
            found.append((f"without {text}", joined(lines[:i] + lines[k:])))
            continue
        removable.append((i, j))
        found.append((f"without {text}", joined(lines[:i] + lines[j:])))
        if m := re.match(r"(\w+)(?:: [\w\[\]]+)? = (.*)", text):
            start = max((k for k in range(i) if lines[k].lstrip().startswith("def ")), default=0)
            stop = end_of(lines, start)
            target, expression = m.groups()
            for v in dict.fromkeys(re.findall(r"(?<![\w.])(?:[xyab]|v\d+)(?!\w)", expression)):
                if v != target:
                    found.append((f"{v} for {text}", joined(lines[:i] + [re.sub(rf"\b{target}\b", v, rest) for rest in lines[i + 1:stop]] + lines[stop:])))
                if expression != v:
                    found.append((f"{v} in {text}", joined(lines[:i] + [f"{width}{target} = {v}"] + lines[i + 1:])))
    for parts in (2, 3, 4):  # many lines at once
        some = max(2, len(removable) // parts)
        for k in range(0, len(removable), some):
            gone = {x for i, j in removable[k:k + some] for x in range(i, j)}
            found.append((f"without {k} of {parts} of {len(lines)}", joined([line for x, line in enumerate(lines) if x not in gone])))
    for text, plain in ((r"'retain'|'outputs'|'grad'|'two calls'", "'once'"), (r"'channels_last'", "'contiguous'"), (r"frozen='\w+'", "frozen=''"), (r"freeze_after=True", "freeze_after=False"), (r"'bfloat16'|'float32'", "'float64'"),
                        (r"autocast=True", "autocast=False"), (r"'trace'", "'script'")):
        where = len(lines) - 1 - next(k for k, line in enumerate(reversed(lines)) if line.startswith("CONFIG"))
        changed = re.sub(text, plain, lines[where])
        if changed != lines[where]:
            found.append((plain, joined(lines[:where] + [changed] + lines[where + 1:])))
    return {what: c for what, c in ((what, without_unused(c)) for what, c in found) if size(c) < size(source)}


def size(source: str) -> tuple:
    lines = [line for line in source.split("\n") if line.strip() and not line.startswith(("import", "from"))]
    return len(lines), len(source), source


def reduce(source: str, failing: Callable[[List[str]], List[str]], at_once: int = 16, seconds: float = 240) -> str:
    """A program that fails as `source` does, and no candidate that is smaller does. `failing` picks from some texts those that fail.

    What did no good is tried again at the end alone; what did is tried again at once.
    """
    stop = time.monotonic() + seconds
    best = without_unused(source)
    if not failing([best]):
        best = source
    order: Dict[str, int] = {}  # 0: has worked, 1: new, 2: has not
    seen: Set[str] = set()
    while time.monotonic() < stop:
        left = {what: c for what, c in candidates(best).items() if c not in seen}
        some = sorted(left, key=lambda what: (order.get(what, 1), size(left[what])))[:at_once]
        if not some:
            break
        texts = [left[what] for what in some]
        found = set(failing(texts))
        seen.update(texts)
        for what in some:
            order[what] = 0 if left[what] in found else 2
        if found:
            best = min(found, key=size)
    return best
