"""What a trace is: its schema, reading, writing, validating and statistics. No models, no policies, no time."""
