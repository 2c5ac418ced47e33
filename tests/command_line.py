"""Runs the built tsmem, and makes the tiny models that the tests of the command line use."""
import functools
import os
import pathlib
import subprocess

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINARY = os.environ.get("TSMEM_BIN", str(ROOT / "build" / "bin" / "tsmem"))


def run(*arguments, **options):
    """The finished process, with text on stdout and stderr; standard input is empty."""
    command = [BINARY, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    environment.pop("NO_COLOR", None)
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300, env=environment, **options)


def runs(*arguments, code=0, **env):
    """Runs with these environment variables, and checks the exit code. Returns the finished process."""
    done = run(*arguments, env=env)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def fails(code, *arguments, says=(), **options):
    """Runs, and checks the exit code and that stderr is one sentence which says all of `says`. Returns that sentence."""
    done = run(*arguments, **options)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    lines = done.stderr.splitlines()
    assert lines and lines[0].startswith("tsmem: ") and lines[0].endswith("."), done.stderr
    # Wrong usage may be followed by where to read more.
    assert all(line.startswith("See: tsmem") for line in lines[1:]) and len(lines) <= 2, done.stderr
    for trace in ("Exception raised from", "Traceback", "frame #", "terminate called", "miniz"):
        assert trace not in done.stderr, done.stderr
    for part in [says] if isinstance(says, str) else says:
        assert part in lines[0], (part, lines[0])
    return lines[0]


class Block(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn = torch.nn.BatchNorm2d(channels)
        self.relu = torch.nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.bn(self.conv(x)))


class Residual(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = torch.nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)) + x)


class Net(torch.nn.Module):
    """Two blocks of one class, a head, and a second method."""

    def __init__(self):
        super().__init__()
        self.block1 = Block(4)
        self.block2 = Block(4)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.block2(self.block1(x)).mean([2, 3]))

    @torch.jit.export
    def features(self, x):
        return self.block1(x)


SPEC = "2x4x8x8"


@functools.cache
def scripted_net():
    torch.manual_seed(0)
    return torch.jit.script(Net())


def save_net(path, **extra_files):
    torch.jit.save(scripted_net(), str(path), _extra_files=extra_files)
    return path
