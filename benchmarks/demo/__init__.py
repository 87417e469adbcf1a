"""How the demo's model in tracer/demo was trained (`train`), and its trace in traces/demo recorded (`make`)."""
