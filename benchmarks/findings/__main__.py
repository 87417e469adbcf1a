"""`python -m benchmarks.findings [TRACES]`: run studies, if TRACES is named, and write FINDINGS.md and its figures."""

import sys
from pathlib import Path

from benchmarks.findings import studies, text

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[2]

if len(sys.argv) > 1:
    studies.run(Path(sys.argv[1]), RESULTS)
text.write(RESULTS, ROOT)
