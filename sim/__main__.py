"""Starts `moe-sim`; so does `python -m sim`."""

from traces.start import importing


def main() -> None:
    """Run the command."""
    with importing("moe-sim"):
        from sim.cli import main as command
    command()


if __name__ == "__main__":
    main()
