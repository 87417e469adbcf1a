"""`python -m replay` is `moe-replay`."""

from replay.commands import main

if __name__ == "__main__":
    main()
