"""What every policy stands on: contract of a policy, residency, scores, names and their grammar, compiled dispatch."""
