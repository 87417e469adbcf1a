"""Starts `moe-replay`; so does `python -m replay`."""

from traces.start import importing


def main() -> None:
    """Run the command."""
    with importing("moe-replay"):
        from replay.cli import main as command
    command()


if __name__ == "__main__":
    main()
