"""The studies behind FINDINGS.md: `python -m benchmarks.findings TRACES` runs them; without TRACES, the text alone.

TRACES is a folder with the arrays that the studies name. Results are counts and times by request, no routing.
"""
