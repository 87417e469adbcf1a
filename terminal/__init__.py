"""Everything that meets a terminal: the frame of the three programs, their options, and what they print."""
