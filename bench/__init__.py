"""Benchmarks.

Commands:

- `python -m bench` (`__main__.py`): networks, fused against every rival
- `pytest bench/ops.py`: single operations (options in `conftest.py`)
- `python -m bench.models`: published models, converted against every rival
- `python -m bench.memory`: memory and time of published models, by mode, and of rivals
- `python -m bench.launches`: the launches of a step on a GPU: bytes, instructions, lower bounds
- `python -m bench.predict`: memory, bytes and launches of networks on a GPU, without one
- `python -m bench.kernels`: kernels, blocks and 1x1 units of a GPU, timed in three ways
- `python -m bench.probes`: ceilings of a GPU (`probes.cu` is a kernel that it launches)
- `python -m bench.report`: tables and plots of the documentation, from `results/`
- `python -m bench.gpu_report`: builds, tests and measures on a GPU machine

Parts of them:

- `contenders.py`: networks, and the ways to train them
- `gpu_networks.py`: networks of `python -m bench.memory` on a GPU, and the process of one of them
- `plan.py`: the tasks of `python -m bench`, the most important first
- `network.py`: the process that measures one task
- `correctness.py`: compares a contender with float64 before it is timed
- `floors.py`: the least bytes and FLOPs of a step
- `measure.py`: times in turn, processes, the machine, its limits and memory
- `records.py`: the rows of the CSV files
- `plots.py`: PNG files
- `dry_run.py`: records launches without a GPU
- `instructions.py`: counts instructions in machine code
"""
