"""However a command ends, it ends with one line, the right stream and the right status."""

import sys

import pytest
import typer

from traces import console
from traces.errors import InputError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command()
def act(how: str, times: int = 1) -> None:
    if how == "interrupted":
        raise KeyboardInterrupt
    if how == "told":
        console.fail("act", "interrupted after 2 of 3", 130)
    if how == "refused":
        raise InputError("no file x\nthere")
    if how == "exit":
        raise typer.Exit(7)


@pytest.mark.parametrize(
    ("arguments", "status", "stderr"),
    [
        (["well"], 0, ""),
        (["interrupted"], 130, "act: error: interrupted\n"),
        (["told"], 130, "act: error: interrupted after 2 of 3\n"),
        (["refused"], 2, "act: error: no file x there\n"),
        (["exit"], 7, ""),
        (["--help"], 0, ""),
    ],
)
def test_an_end_has_its_status_and_its_line(
    arguments: list[str],
    status: int,
    stderr: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["act", *arguments])
    with pytest.raises(SystemExit) as ended:
        console.main(app, "act")
    assert ended.value.code == status
    assert capsys.readouterr().err == stderr


def test_a_usage_error_is_told_as_typer_tells_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["act", "well", "--times", "many"])
    with pytest.raises(SystemExit) as ended:
        console.main(app, "act")
    assert ended.value.code == 2
    assert "Usage: act" in capsys.readouterr().err
