"""What the plugin adds to `import verl`: both imported in turn, in fresh processes, medians.

python benchmarks/import_time.py [--repeats 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

CODE = "import time; t = time.perf_counter(); import verl; print(time.perf_counter() - t)"


def seconds(policy: str) -> float:
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": policy}
    result = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True
    )
    return float(result.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    seconds("auto")  # fills the file cache
    pairs = [(seconds("none"), seconds("pods")) for _ in range(repeats)]
    without, with_plugin = (statistics.median(column) for column in zip(*pairs, strict=True))
    added = statistics.median(b - a for a, b in pairs)
    print(
        f"import verl: {without:.2f} s without the plugin, {with_plugin:.2f} s with it, {added * 1e3:+.0f} ms"
    )


if __name__ == "__main__":
    main()
