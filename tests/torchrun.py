"""Starts modules in several processes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def torchrun(processes, arguments, *, timeout_s=180, backend="auto"):
    """Runs `torchrun -m` with `arguments`; each process has one thread.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout_s`. Has the output up to then.
    """
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PREACT_KERNELS_BACKEND": backend,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", *launcher, "-m", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        process.terminate()  # and the launcher ends its processes, which `kill` would leave
        error.stdout, error.stderr = process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, *output)
