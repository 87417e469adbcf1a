"""The board: policies over fixed traces, sizes and machines, ranked by one score: `moe-sim board`.

`cases.py` has what is fixed and the policies that ship, `running.py` runs them, and `result.py` holds what was
found: the score, its parts and the file.
"""
