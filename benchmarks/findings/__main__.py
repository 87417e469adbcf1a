"""`python -m benchmarks.findings [TRACES MODEL]`: run studies, if TRACES are named, and write FINDINGS.md and figures.

MODEL: folder of the Mixtral that `python -m benchmarks.demo.train TEXT --architecture mixtral --steps 600` writes.
"""

import sys
from pathlib import Path

from benchmarks.findings import studies, text

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[2]

if len(sys.argv) > 1:
    studies.run(Path(sys.argv[1]), Path(sys.argv[2]), RESULTS)
text.write(RESULTS, ROOT)
