"""An interrupt while a command imports its modules is one line, and no traceback."""

import signal
import subprocess
import sys

import pytest

INTERRUPT = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
WHILE_IMPORTING = f"from traces.start import importing\nwith importing('act'): {INTERRUPT}\nprint('goes on')"


def ended(code: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_an_interrupt_while_modules_are_imported_is_one_line() -> None:
    assert ended(WHILE_IMPORTING) == (130, "", "act: error: interrupted\n")


def test_an_interrupt_that_the_shell_ignores_is_ignored() -> None:
    ignored = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    assert ended(f"{ignored}\n{WHILE_IMPORTING}") == (0, "goes on\n", "")


def test_a_later_interrupt_is_pythons_own() -> None:
    status, _, err = ended(f"from traces.start import importing\nwith importing('act'): pass\n{INTERRUPT}")
    assert status == -signal.SIGINT
    assert err.endswith("KeyboardInterrupt\n")


@pytest.mark.parametrize("package", ["sim", "tracer", "replay"])
def test_a_package_is_its_command(package: str) -> None:
    done = subprocess.run([sys.executable, "-m", package, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage: moe-" in done.stdout
