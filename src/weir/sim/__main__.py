"""Repeats simulated worlds by seed: `python -m weir.sim SEED [SEED …]`, or `FIRST-LAST`. Prints traces, stops at a failure."""

import argparse
import sys
import traceback

from weir.sim.seeds import SeedBroke, run_seed


def _seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main() -> int:
    """Run the worlds of the seeds on the command line; 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m weir.sim", description="Run simulated worlds by seed.")
    parser.add_argument("seeds", nargs="+", type=_seeds, help="a seed, or FIRST-LAST")
    for seed in [seed for seeds in parser.parse_args().seeds for seed in seeds]:
        try:
            trace = run_seed(seed)
        except SeedBroke as broke:
            traceback.print_exc()
            sys.stderr.write(f"{broke}\n")
            return 1
        sys.stdout.write(f"seed {seed}: trace {trace[:16]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
