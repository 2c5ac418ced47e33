"""Rewrites many programs with one run of the tool a level, and compares each with its original.

    python check.py FILE.py [LEVEL...]     a program's file (as `make fuzz` prints it): says what is wrong, exit code 1 where something is
"""
import fnmatch
import importlib.util
import logging
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import warnings
import zlib
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Tuple

warnings.filterwarnings("ignore")
import torch

import compiled
import judge
import step

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TSMEM_BUILD", ROOT / "build"))
TOOL = os.environ.get("TSMEM_BIN", str(BUILD / "bin" / "tsmem"))
OPS = os.environ.get("TSMEM_OPS", str(BUILD / "lib" / "libtsmem_ops.so"))
PATTERNS = ("conv-bn-act-recompute conv-bn-act bn-act-max-pool bn-add-act bn-act-mul bn-act batch-norm instance-norm act-mul activation conv dropout max-pool shape-only smooth-activation"
            " linear layer-norm cat add mul attention softmax copies addmm rms-norm composed-activation prelu glu rrelu rnn pointwise lookup").split()
TIMEOUT = 300
# What the tool refuses by name, and documents: docs/regions.md.
REFUSALS = (re.compile(r"Checkpoint can't wrap (\S+): (?:its|an argument of its) method \S+ .*, (?:so it can't be|and a method that is) run again"), re.compile(r"(\S+) is to be checkpointed but not \S+, which is called by the same code"))


@dataclass
class Program:
    name: str
    source: str
    config: dict
    make: Callable  # the eager class
    scripted: torch.jit.ScriptModule
    state: dict
    wrong: Dict[str, List[str]] = field(default_factory=dict)  # by level
    refused: List[str] = field(default_factory=list)


def setup() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # Dynamo's, and tsmem's of graph breaks
    os.environ["TSMEM_OPS"] = OPS
    if not any(s.name.startswith("tsmem::") for s in torch._C._jit_get_all_schemas()):
        torch.ops.load_library(OPS)


class Discarded(Exception):
    """The program can't be run: by eager PyTorch, or TorchScript can't compile it."""


def read(name: str, source: str, folder: str, number: int) -> Program:
    """The program in TorchScript. Raises Discarded."""
    path = pathlib.Path(folder) / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"tsmem_random_{name}", path)
    namespace = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = namespace
    try:
        spec.loader.exec_module(namespace)
        config = namespace.CONFIG
        torch.manual_seed(number)
        eager = namespace.P()
        step.prepare(eager, config)
        state = {k: v.detach().clone() for k, v in eager.state_dict().items()}
        records = step.run(eager, {**config, "calls": config["calls"][:2]})
        if step.raised(records):
            raise Discarded("eager: " + step.raised(records))
        torch.manual_seed(number)
        eager = namespace.P()
        step.prepare(eager, config)
        if config["how"] == "trace":
            scripted = torch.jit.trace(eager, tuple(step.inputs({**config, "inputs": ["made", "made"]}, 0, step.dtype_of(config))[1]), check_trace=False, strict=False)
            with torch.no_grad():  # tracing has run it
                for k, v in scripted.state_dict().items():
                    v.copy_(state[k])
        else:
            scripted = torch.jit.script(eager)
    except Discarded:
        raise
    except Exception as error:
        raise Discarded(f"{type(error).__name__}: {error}") from None
    return Program(name, source, config, namespace.P, scripted, state)


class Container(torch.nn.Module):
    def __init__(self, programs: List[Program]):
        super().__init__()
        self.first = torch.nn.Conv2d(1, 1, 1)
        for p in programs:
            self.add_module(p.name, p.scripted)

    def forward(self, x):
        return torch.relu(self.first(x))


class Failed(Exception):
    """The tool failed, or its file can't be loaded."""

    def __init__(self, what: str, refused: Optional[str] = None):
        super().__init__(what)
        self.refused = refused  # the module that was refused by name


def tool(*arguments: str) -> None:
    try:
        done = subprocess.run([TOOL, *arguments], capture_output=True, text=True, errors="replace", timeout=TIMEOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    except subprocess.TimeoutExpired:
        raise Failed(f"the tool runs for over {TIMEOUT} s") from None
    if done.returncode == 0:
        return
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    what = f"the tool ends with exit code {done.returncode}: {said[0] if said else ''}"
    for refusal in REFUSALS:
        if done.returncode == 2 and (m := refusal.search(what)):
            raise Failed(what, m.group(1))
    raise Failed(what)


def options(level: str) -> List[str]:
    if level == "plan":
        return ["--level", "plan", "--budget", "100%", "--input", "1x1x4x4", "--no-verify", "--solve-seconds", "1"]
    if level.startswith("only "):
        return [part for name in level.split()[1:] for part in ("--only", name)]
    if level.startswith("skip "):
        return ["--skip", level.split()[1]]
    return ["--level", "regions" if level == "checkpoint" else level]


def blocks(program: Program) -> List[str]:
    """The paths of the modules that --checkpoint wraps: all of the program's own, but for most that would be refused, each of which costs a run of the tool."""
    own = re.findall(r"^class B.*?(?=^class|\Z)", program.source, re.M | re.S)
    in_place = "|".join(re.findall(r"def (f\d+)(?=.*\n(?:    .*\n)*?    .*(?:_\(|inplace=True|[*+/-]=))", program.source)) or "no"
    once = re.compile(rf"self\.\w+ [-+*/]?= .*(?<!\))$|\b[xy](?:\.|\[.*?\] )?\w*(?:_\(| [-+*/]?= \w)|_\([xy]\b|\([xy],.*inplace=True|\b(?:{in_place})\([xy]\b", re.M)
    if any(once.search(text.split("def forward")[1]) for text in own) and zlib.crc32(program.source.encode()) % 10:
        return []
    children = [name for name, _ in program.scripted.named_children()]
    return [f"{program.name}.{name}" for name in children if re.match(r"b\d|seq|mlp", name)]


def rewrite(programs: List[Program], level: str, folder: str, seed: int) -> Tuple[torch.jit.ScriptModule, List[Program]]:
    """The container of the programs, rewritten and loaded, and those that are in it. Raises Failed."""
    before, after = os.path.join(folder, "before.pt"), os.path.join(folder, "after.pt")
    programs = list(programs)
    globs = [g for p in programs for g in blocks(p)] if level == "checkpoint" else []
    if level == "checkpoint":
        programs = [p for p in programs if blocks(p)]
    torch.jit.script(Container(programs)).save(before)
    while True:
        try:
            tool("rewrite", before, "-o", after, "--force", "-q", *options(level), *[part for g in globs for part in ("--checkpoint", g)])
            break
        except Failed as failed:
            if failed.refused is None or not globs:
                raise
            name = failed.refused.split(".")[0]
            left = [g for g in globs if not g.startswith(name + ".")]
            if len(left) == len(globs):
                raise
            globs = left
            for p in programs:
                if p.name == name:
                    p.refused.append(str(failed))
            programs = [p for p in programs if p.name != name]
    try:
        module = torch.jit.load(after)
    except Exception as error:
        raise Failed(f"its file can't be loaded: {str(error).strip().splitlines()[-1]}") from None
    if level == "plan":
        choose(module, seed)
    return module, programs


def choose(module: torch.jit.ScriptModule, seed: int) -> None:
    """A plan by chance: what becomes of every output is an attribute of its module."""
    for path, m in sorted(module.named_modules()):
        rng = random.Random(f"{seed} {path}")
        for i in range(10_000):
            name = f"_tsmem_recompute_{i}"
            if not m._c.hasattr(name):
                break
            m._c.setattr(name, rng.choice([-1, 0, 1, 2, 2]))


def failures(programs: List[Program], level: str, folder: str, seed: int) -> Tuple[List[Tuple[torch.jit.ScriptModule, List[Program]]], Dict[str, str]]:
    """Rewritten containers, and what the tool said about the programs that it fails on: halves until it is one program."""
    if not programs:
        return [], {}
    try:
        return [rewrite(programs, level, folder, seed)], {}
    except Failed as failed:
        if len(programs) == 1:
            return [], {programs[0].name: str(failed)}
    half = len(programs) // 2
    done, said = failures(programs[:half], level, folder, seed)
    more, further = failures(programs[half:], level, folder, seed)
    return done + more, {**said, **further}


def check(programs: List[Program], levels: List[str], folder: str, seed: int) -> None:
    """Fills in what is wrong with each program, level by level."""
    path = os.path.join(folder, "original.pt")
    torch.jit.script(Container(programs)).save(path)
    module = torch.jit.load(path)
    originals = {}
    seen = {p.name: [code(getattr(module, p.name), p)] for p in programs}
    for p in programs:
        o = make_original(p, getattr(module, p.name), folder)
        if step.raised(o.records):
            p.wrong["discarded"] = [step.raised(o.records)]
        else:
            originals[p.name] = o
    programs = [p for p in programs if p.name in originals]
    for level in levels:
        if level == "compile":
            for p in programs:
                if wrong := compiled.wrong(p.config, p.source, lambda p=p: eager_module(p)):
                    p.wrong[level] = wrong
            continue
        done, said = failures(programs, level, folder, seed)
        for p in programs:
            if p.name in said:
                p.wrong[level] = [said[p.name]]
        programs = [p for p in programs if p.name not in said]  # each costs many runs of the tool
        for container, those in done:
            for p in those:
                m = getattr(container, p.name)
                if p.config["freeze_after"]:
                    step.freeze(m, p.config)
                text = code(m, p)
                if text in seen[p.name] and unchanged(m, originals[p.name]):
                    continue  # the original, or what another level has written
                seen[p.name].append(text)
                wrong = judge.verdict(originals[p.name], step.run(m, p.config, states=originals[p.name].states))
                if wrong:
                    p.wrong[level] = wrong


def code(module, p: Program) -> str:
    """All that is run when the program is called. What TorchScript adds to the names of types differs from file to file."""
    return re.sub(r"___torch_mangle_\d+", "", getattr(module, p.config["method"]).inlined_graph.str(False))


def unchanged(module, o: judge.Original) -> bool:
    """Whether its parameters, buffers, lists and numbers are the original's before its first call."""
    mine, theirs = step.snapshot(module), o.states[0]
    return str(mine["others"]) == str(theirs["others"]) and all(torch.equal(a, b) for a, b in zip(mine["tensors"], theirs["tensors"], strict=True))


def eager_module(p: Program) -> torch.nn.Module:
    m = p.make().to(step.dtype_of(p.config))
    m.load_state_dict(p.state)
    step.freeze(m, p.config)
    return m


def make_original(p: Program, module, folder: str) -> judge.Original:
    def load():
        path = os.path.join(folder, f"{p.name}.pt")
        if not os.path.exists(path):
            p.scripted.save(path)
        m = torch.jit.load(path)
        if p.config["freeze_after"]:
            step.freeze(m, p.config)
        return m

    if p.config["freeze_after"]:
        step.freeze(module, p.config)
    states: List[dict] = []
    records = step.run(module, p.config, keep=states)
    return judge.Original(p.config, p.source, load, lambda: eager_module(p), states, records)


def main(path: str, levels: List[str]) -> int:
    setup()
    with tempfile.TemporaryDirectory(prefix="tsmem-random-") as folder:
        program = read("program", pathlib.Path(path).read_text(), folder, 0)
        check([program], levels, folder, 0)
    for level, wrong in program.wrong.items():
        print(f"{level}:")
        for line in wrong:
            print("   ", line.strip())
    print("wrong" if program.wrong else "right")
    return 1 if program.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:] or ["ops", "regions", "plan", "checkpoint", "compile"]))
