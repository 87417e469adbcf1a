"""Starts `moe-trace`; so does `python -m tracer`."""

from traces.start import importing


def main() -> None:
    """Run the command."""
    with importing("moe-trace"):
        from tracer.cli import main as command
    command()


if __name__ == "__main__":
    main()
