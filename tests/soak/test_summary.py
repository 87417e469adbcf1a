"""A soak adds a row to the table that ends docs/reliability.md."""

from pathlib import Path

from tests.soak.__main__ import COLUMNS, HEAD, Soak, append, summary_of

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def test_a_soak_adds_one_row_to_the_table_at_the_end_of_the_page(tmp_path):
    soak = Soak(tmp_path, seed=7)
    soak.done.update({"record, kill": 3, "replay disk, kill": 2, "sweep, worker": 1, "SIGKILL sent": 4, "commands": 9})
    soak.found.append("record: status 1\n| of a table")
    row = summary_of(soak, 20.4, 6)
    report = tmp_path / "page.md"
    report.write_text(before := PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    append(row, report)
    assert report.read_text(encoding="utf-8") == before + row
    cells = dict(zip(COLUMNS, row.replace("\\|", "/").strip("| \n").split(" | "), strict=True))
    assert (cells["minutes"], cells["seed"], cells["rounds"]) == ("20", "7", "6")
    assert (cells["kill"], cells["worker"], cells["full disk"]) == ("3, 0, 0, 0, 2", "0, 1", "0, 0, 0, 0")
    assert (cells["sent"], cells["commands"]) == ("4, 0, 0, 0, 0", "9")
    assert cells["findings"] == "1; record: status 1 / of a table"


def test_the_page_ends_with_rows_of_that_table():
    rows = PAGE.read_text(encoding="utf-8").partition(HEAD)[2].splitlines()
    assert rows
    assert all(len(row.split(" | ")) == len(COLUMNS) for row in rows)


def test_a_new_file_gets_the_table(tmp_path):
    report = tmp_path / "new.md"
    for _ in range(2):
        append("| row |\n", report)
    assert report.read_text(encoding="utf-8") == f"\n{HEAD}| row |\n| row |\n"
