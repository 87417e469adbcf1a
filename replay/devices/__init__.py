"""What a replay runs on: a logical clock, threads, or a GPU, behind one interface, and what they need around them."""
