"""`python -m tracer` is `moe-trace`."""

from tracer.commands import main

if __name__ == "__main__":
    main()
