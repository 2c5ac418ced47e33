"""Random programs by seed: `python fuzz.py A:B` makes programs A to B - 1, rewrites them, and compares. `make fuzz SEEDS=A:B` calls it.

--keep FOLDER writes every failure there, reduced; --no-reduce leaves them as they are; --levels ops,regions takes these levels alone.
The last line is `N programs, K wrong`; the exit code is 1 where K > 0.
"""
import argparse
import collections
import os
import pathlib
import pickle
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional

import check
import generate
import reduce

BATCH = 64  # programs in one container; a program's tests depend on its seed alone, so containers begin at multiples of it
SECONDS = 600  # of a batch; more is a hang
REDUCED_SECONDS = 60  # of some programs of a few lines, among which may be endless loops
ATTEMPTS = 20  # programs that eager PyTorch or TorchScript refuses, in a row


@dataclass
class Outcome:
    seed: int
    source: str
    wrong: Dict[str, List[str]]  # by level
    discarded: str = ""


def levels_of(batch: int) -> List[str]:
    names = check.PATTERNS[:2] + check.PATTERNS
    return ["ops", "regions", "plan", "checkpoint", "compile", f"only {names[batch % len(names)]}"]


def outcomes(seeds: List[int], levels: List[str], batch: int) -> List[Outcome]:
    """The programs of these seeds, compared."""
    check.setup()
    with tempfile.TemporaryDirectory(prefix="tsmem-random-") as folder:
        programs, results = [], []
        for seed in seeds:
            for attempt in range(ATTEMPTS):
                source = generate.program(seed, attempt)
                try:
                    programs.append(check.read(f"p{seed}", source, folder, seed))
                    break
                except check.Discarded as why:
                    last = str(why)
            else:
                results.append(Outcome(seed, source, {}, last))
        check.check(programs, levels, folder, batch)
        for p in programs:
            discarded = p.wrong.pop("discarded", [""])[0]
            results.append(Outcome(int(p.name[1:]), p.source, p.wrong, discarded))
    return results


def compared(sources: List[str], level: str, seed: int) -> List[Dict[str, List[str]]]:
    """What is wrong with each of these texts; None for what is no program."""
    check.setup()
    with tempfile.TemporaryDirectory(prefix="tsmem-random-") as folder:
        programs = []
        for i, source in enumerate(sources):
            try:
                programs.append(check.read(f"p{i}", source, folder, seed))
            except check.Discarded:
                programs.append(None)
        check.check([p for p in programs if p], [level], folder, seed)
        return [p.wrong if p else {} for p in programs]


def apart(f: Callable[[], object], seconds: int) -> object:
    """f() in a process of its own. Raises RuntimeError where that ends by a signal, or takes too long."""
    with tempfile.NamedTemporaryFile(prefix="tsmem-random-") as file:
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(seconds)
                os.setpgid(0, 0)
                with open(file.name, "wb") as out:
                    pickle.dump(f(), out)
                os._exit(0)
            except BaseException:
                import traceback
                traceback.print_exc()
            os._exit(1)
        try:
            _, status = os.waitpid(pid, 0)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            raise
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            raise RuntimeError(f"takes over {seconds} s" if number == signal.SIGALRM else f"ends by signal {number} ({signal.strsignal(number)})")
        if os.WEXITSTATUS(status) != 0:
            raise RuntimeError("the comparison itself fails")
        return pickle.loads(pathlib.Path(file.name).read_bytes())


def surviving(items: list, f: Callable[[list], list], broken: Callable[[object, str], object], seconds: int = SECONDS) -> list:
    """f(items) in a process of its own; where that dies, of halves, and what one item alone dies of."""
    if not items:
        return []
    try:
        return apart(lambda: f(items), seconds)
    except RuntimeError as error:
        if len(items) == 1:
            return [broken(items[0], str(error))]
    half = len(items) // 2
    return surviving(items[:half], f, broken, seconds) + surviving(items[half:], f, broken, seconds)


def dead(seed: int, why: str, batch: int) -> Outcome:
    """A seed whose comparison dies: the original may do so by itself."""
    source = generate.program(seed, 0)
    try:
        apart(lambda: outcomes([seed], [], batch), SECONDS)
    except RuntimeError as error:
        return Outcome(seed, source, {}, f"the original {error}")
    return Outcome(seed, source, {"all": [why]})


def reduced(source: str, level: str, wrong: List[str], seed: int) -> str:
    wanted = reduce.kind(wrong)

    def failing(sources: List[str]) -> List[str]:
        results = surviving(sources, lambda some: compared(some, level, seed), lambda s, why: {level: [why]}, REDUCED_SECONDS)
        return [s for s, w in zip(sources, results) if level in w and reduce.same(reduce.kind(w[level]), wanted)]

    # A failure of the tool's costs a run of it for each program.
    return reduce.reduce(source, failing, 16 if wanted & {x for x in wanted if x.startswith(("eager", "raises"))} else 4)


def report(o: Outcome, level: str, source: str) -> str:
    """A program's file that says what is wrong with it, and shows it when it is run."""
    wrong = "\n".join(f"# {line}" for line in [x for w in o.wrong[level] for x in w.strip().splitlines()[-1:]][:12])
    also = ", ".join(l for l in o.wrong if l != level)
    return f"# Program {o.seed}, level {level}{' (also ' + also + ')' if also else ''}:\n{wrong}\n# Shown by: python tests/random/check.py THIS_FILE '{level}'\n{source.lstrip()}"


class Progress:
    """On standard error: a bar on a terminal, else a line a minute, so that a run that is cut off has said how far it came."""

    EVERY = 60  # seconds

    def __init__(self, total: int):
        self.total, self.start, self.shown = total, time.monotonic(), sys.stderr.isatty()
        self.said = self.start

    def show(self, done: int, programs: int, wrong: int, next_seed: int) -> None:
        now = time.monotonic()
        if self.shown:
            part = done / max(self.total, 1)
            left = (now - self.start) * (1 / part - 1) if part else 0
            sys.stderr.write(f"\r[{'#' * int(30 * part):30}] {done} of {self.total}, {wrong} wrong, {left / 60:.0f} min left ")
        elif now - self.said < self.EVERY:
            return
        else:
            self.said = now
            sys.stderr.write(f"{programs} programs, {wrong} wrong, {done - programs} discarded before seed {next_seed}, {(now - self.start) / 60:.0f} min\n")
        sys.stderr.flush()

    def clear(self) -> None:
        if self.shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def run(first: int, last: int, keep: Optional[str] = None, shrink: bool = True, only: Optional[List[str]] = None, most: int = 20) -> int:
    """Prints failures and the sum; the number of wrong programs."""
    total = wrong = done = 0
    discarded: collections.Counter = collections.Counter()
    kinds: collections.Counter = collections.Counter()
    progress = Progress(last - first)
    for batch in range(first // BATCH, (last + BATCH - 1) // BATCH):
        seeds = [s for s in range(batch * BATCH, (batch + 1) * BATCH) if first <= s < last]
        levels = only or levels_of(batch)
        results = surviving(seeds, lambda some: outcomes(some, levels, batch), lambda seed, why: dead(seed, why, batch))
        for o in sorted(results, key=lambda o: o.seed):
            done += 1
            if o.discarded:
                discarded[o.discarded.strip().splitlines()[-1][:70]] += 1
                continue
            total += 1
            if not o.wrong:
                continue
            wrong += 1
            level = min(o.wrong, key=lambda l: (levels + ["all"]).index(l))
            name = (level, reduce.kind(o.wrong[level]))
            kinds[name] += 1
            progress.clear()
            print(f"program {o.seed} is wrong at {', '.join(o.wrong)}: {o.wrong[level][0].strip().splitlines()[-1][:200]}", flush=True)
            if shrink and level != "all" and kinds[name] <= 2 and sum(min(k, 2) for k in kinds.values()) <= most:
                text = report(o, level, reduced(o.source, level, o.wrong[level], batch))
            else:
                text = report(o, level, o.source)
            if keep:
                pathlib.Path(keep).mkdir(parents=True, exist_ok=True)
                (pathlib.Path(keep) / f"{o.seed}.py").write_text(text)
            elif shrink:
                print("\n" + text + "\n", flush=True)
        progress.show(done, total, wrong, min((batch + 1) * BATCH, last))
    progress.clear()
    if discarded:
        print(f"{sum(discarded.values())} discarded, which the original itself can't run: " + "; ".join(f"{n} x {why}" for why, n in discarded.most_common(5)))
    print(f"{total} programs, {wrong} wrong", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", help="A:B")
    parser.add_argument("--keep", help="folder for the failures")
    parser.add_argument("--no-reduce", action="store_true")
    parser.add_argument("--levels")
    parser.add_argument("--most", type=int, default=20, help="reduce that many failures at most")
    o = parser.parse_args()
    try:
        first, last = (int(x) for x in o.seeds.split(":"))
    except ValueError:
        parser.error(f"'{o.seeds}' is not a range of seeds: write 0:1000.")
    if not os.path.exists(check.TOOL):
        parser.error(f"{check.TOOL} is not built: make build.")
    return 1 if run(first, last, o.keep, not o.no_reduce, o.levels.split(",") if o.levels else None, o.most) else 0


if __name__ == "__main__":
    sys.exit(main())
