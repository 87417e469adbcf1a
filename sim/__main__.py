"""`python -m sim` is `moe-sim`."""

from sim.commands import main

if __name__ == "__main__":
    main()
