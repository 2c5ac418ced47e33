"""Every command on damaged and hostile files: an exit code of the contract, one sentence, within 20 seconds and 8 GB.

    python tests/hostile/run_hostile.py 0:2000            # what `make hostile` runs
    python tests/hostile/run_hostile.py 17:18 --keep DIR  # one of them; its file stays in DIR
"""
import argparse
import concurrent.futures
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import time
import warnings

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import mutate
from command_line import BINARY, save_net

SECONDS = 20  # of processor time, and 8 GB: forks.c sets both
INPUT = "2x4x8x8"
CODES = {0, 1, 2, 3, 4}


class Rich(torch.nn.Module):
    """Of most that a file can hold: constants, lists, dicts, tuples, strings, views, shared and odd tensors, loops, branches, several classes."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(4)
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1), torch.nn.ReLU()) for _ in range(2)])
        self.layers[1][0].weight = self.layers[0][0].weight
        self.drop = torch.nn.Dropout(0.5)
        self.register_buffer("view", torch.rand(4, 3).t())
        self.register_buffer("wide", torch.rand(1).expand(7))
        self.register_buffer("quantized", torch.quantize_per_channel(torch.rand(4, 3), torch.rand(4) + 0.1, torch.zeros(4, dtype=torch.long), 0, torch.qint8))
        self.register_buffer("sparse", torch.eye(3).to_sparse(), persistent=False)
        self.register_buffer("complex", torch.rand(2, dtype=torch.complex64))
        self.scales = {"a": [1, 2, 3], "b": [4]}
        self.name = ("net", 2.5, True)
        self.several = torch.jit.Attribute([torch.rand(2), torch.rand(3)], list[torch.Tensor])

    def forward(self, x):
        x = self.norm(self.conv(x))
        for layer in self.layers:
            x = torch.relu_(layer(x) + x)
        if x.dim() == 4:
            for i in range(len(self.scales["a"])):
                x = x * self.scales["a"][i] + 0.1
        return self.drop(x).mean() + self.complex.real.sum()


class RichProgram(torch.nn.Module):
    """Of most that an exported graph can hold: lists of tensors, None among tensors, constants, mutations, tied weights, a number and a dict."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.BatchNorm2d(4)
        self.b.weight = self.a.weight
        self.register_buffer("steps", torch.zeros(1))
        self.table = torch.rand(4, 1, 1)

    def forward(self, x, scale=1.0):
        self.steps.add_(1)
        first, second = torch.chunk(torch.relu(self.norm(self.a(x))), 2, 1)
        y = self.b(torch.cat([second, first], 1) * self.table) * scale
        y[:, torch.tensor([0, 2])] = 0
        return {"sum": y.sum(), "all": [y, x.to(torch.float64).mean()], "none": None}


def make_models(folder):
    torch.manual_seed(0)
    net, rich, traced = folder / "net.pt", folder / "rich.pt", folder / "traced.pt"
    save_net(net, **{"labels.txt": "cat"})
    scripted = torch.jit.script(Rich())
    scripted.save(str(rich))
    torch.jit.trace(torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 3)), torch.rand(2, 4, 8, 8)).save(str(traced))
    rewritten = folder / "rewritten.pt"
    subprocess.run([BINARY, "rewrite", net, "-o", rewritten, "-q", "--force"], check=True)
    torch.save((torch.rand(2, 4, 8, 8),), folder / "inputs.pt")
    return [net, rich, traced, rewritten]


def make_programs(folder):
    """Programs of torch.export: one with a dynamic batch, one that is rewritten, one of most that a program can hold."""
    torch.manual_seed(0)
    x = torch.rand(2, 4, 8, 8)
    dynamic, rewritten, rich = folder / "dynamic.pt2", folder / "rewritten.pt2", folder / "rich.pt2"
    net = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Flatten(), torch.nn.Linear(256, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(net.train(), (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},)), dynamic, extra_files={"labels.txt": "cat"})
        torch.export.save(torch.export.export(RichProgram().train(), (x,), {"scale": 2.0}), rich)
    subprocess.run([BINARY, "rewrite", dynamic, "-o", rewritten, "-q", "--force"], check=True)
    return [dynamic, rewritten, rich]


def made_apart(kind, folder):
    """Good files, "models" or "programs", made in a process of their own: the names in a file depend on what its process has compiled before, and what a seed makes of a file depends on those."""
    made = subprocess.run([sys.executable, "-W", "ignore", __file__, "--make", kind, folder], check=True, stdout=subprocess.PIPE, text=True)
    return [pathlib.Path(line) for line in made.stdout.splitlines()]


def program_commands(bad, good, out):
    """What `commands` are for TorchScript."""
    todo = commands(bad, good, out)
    del todo["restore"]
    todo["rewrite --input"] = ["rewrite", bad, "-o", out, "--input", INPUT]
    todo["import"] = ["import", bad, "-o", out]
    return todo


def commands(bad, good, out):
    """Name -> arguments. `good` is the file that `bad` was made from."""
    return {
        "inspect": ["inspect", bad],
        "rewrite": ["rewrite", bad, "-o", out],
        "restore": ["rewrite", bad, "-o", out, "--restore"],
        "rewrite --input": ["rewrite", bad, "-o", out, "--input", INPUT, "--checkpoint", "**"],
        "rewrite --budget": ["rewrite", bad, "-o", out, "--input", INPUT, "--budget", "80%", "--estimate"],
        "diff": ["diff", good, bad],
        "diff --format html": ["diff", bad, good, "--format", "html"],
        "verify": ["verify", good, bad, "--input", INPUT, "--calls", "2", "--seeds", "2", "--no-measure"],
        "profile": ["profile", bad, "--input", INPUT],
        "plan": ["plan", bad, "--input", INPUT, "--points", "2"],
    }


def input_commands(bad, good):
    return {"profile": ["profile", good, "--inputs", f"@{bad}"], "verify": ["verify", good, good, "--input", f"@{bad}", "--no-measure"]}


class Tool:
    """The tool behind forks.c: its libraries are loaded once, and each command runs in a fork of its own. For one thread at a time."""

    def __init__(self, folder):
        library = folder / "forks.so"
        if not library.exists():
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, pathlib.Path(__file__).with_name("forks.c")], check=True)
        self.errors = folder / f"errors{id(self)}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LD_PRELOAD": str(library)}
        self.process = subprocess.Popen([BINARY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def run(self, arguments):
        """(exit code, minus the signal, or None after 20 s; stderr)."""
        self.process.stdin.write("\t".join([str(self.errors), *map(str, arguments)]) + "\n")
        self.process.stdin.flush()
        status = self.process.stdout.readline().strip()
        code = None if status == "slow" else os.waitstatus_to_exitcode(int(status))
        return code, self.errors.read_text(errors="replace")

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def fault(tool, arguments, out):
    """What went wrong with one command, or None."""
    out.unlink(missing_ok=True)
    code, text = tool.run(arguments)
    if code is None:
        return f"takes more than {SECONDS} s"
    if code not in CODES:
        return f"exit {code}: {text.strip()[:300]}"
    if code in (2, 3, 4) and not text.startswith("tsmem: "):
        return f"exit {code} without a sentence: {text.strip()[:300]}"
    if any(trace in text for trace in ("Exception raised from", "frame #", "terminate called", "Traceback")):
        return f"exit {code} with a trace: {text.strip()[:300]}"
    if code in (2, 3) and out.exists():
        return f"exit {code} and an output"
    return None


def check(tool, seed, models, folder, few=False):
    """The faults of one bad file, as text; `few`: of two commands alone, others for other seeds."""
    good = models[seed % len(models)]
    exported = good.suffix == ".pt2"
    of_inputs = seed % 10 == 9 and not exported
    bad, out = folder / f"bad{seed}{good.suffix}", folder / f"out{seed}{good.suffix}"
    what, data = mutate.mutated(good.with_name("inputs.pt") if of_inputs else good, seed)
    bad.write_bytes(data)
    todo = list((input_commands(bad, good) if of_inputs else (program_commands if exported else commands)(bad, good, out)).items())
    if few:
        todo = [todo[(seed // 4) % len(todo)], todo[(seed // 4 + 1 + seed) % len(todo)]]
    found = [f"seed {seed} ({what} of {good.name}), {name}: {why}" for name, arguments in todo if (why := fault(tool, arguments, out))]
    left = sorted(p.name for p in folder.glob(f"out{seed}{good.suffix}?*"))
    if left:
        found.append(f"seed {seed}: left behind {left}")
    out.unlink(missing_ok=True)
    return len(todo), found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seeds", nargs="?", default="0:2000", help="first:last, last not included")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--exported", action="store_true", help="programs of torch.export in place of TorchScript files")
    parser.add_argument("--keep", type=pathlib.Path, help="keep the files here")
    parser.add_argument("--make", nargs=2, metavar=("models|programs", "FOLDER"), help="write the good files there, print their names, and no more")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # zipfile's, of names that are there twice
    if options.make:
        kind, folder = options.make
        print(*{"models": make_models, "programs": make_programs}[kind](pathlib.Path(folder)), sep="\n")
        return 0
    first, last = map(int, options.seeds.split(":"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        models = (make_programs if options.exported else make_models)(folder)
        runs, wrong, began = 0, 0, time.time()

        tools = queue.SimpleQueue()
        for _ in range(options.jobs):
            tools.put(Tool(folder))

        def one(seed):
            tool = tools.get()
            count, found = check(tool, seed, models, folder)
            tools.put(tool)
            if not options.keep:
                for bad in folder.glob(f"bad{seed}.*"):
                    bad.unlink()
            return count, found

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for done, (count, found) in enumerate(pool.map(one, range(first, last)), 1):
                runs += count
                wrong += bool(found)
                for line in found:
                    print(line, flush=True)
                if done % 100 == 0:
                    print(f"  {done} files, {time.time() - began:.0f} s", flush=True)
        while not tools.empty():
            tools.get().close()
    print(f"{last - first} files, {runs} commands, {wrong} files wrong")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
