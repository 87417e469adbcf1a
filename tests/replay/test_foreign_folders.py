"""A foreign folder of results runs no code, opens no URL and changes nothing outside of itself (docs/trust.md)."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

import replay.commands
from sim.report import inputs
from sim.sweeps import winner
from sim.sweeps.store import CELLS
from tests.support.command import moe_sim, run
from tests.support.tiny import SIZES
from traces.errors import InputError
from traces.files import read_toml
from traces.shards import Shards
from traces.synthetic import synthetic
from traces.writer import write_trace

SWEEP = ("sweep", "--requests", "2", "--untimed", "--policies", "lru", "--cache-sizes", "25%", "--quiet")

POLICY = """
from pathlib import Path
from policies import Policy
Path("RAN").touch()
class Mine(Policy):
    def victim(self, view):
        return view.candidates[0]
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("swept")
    made = synthetic(3, tokens=6, layers=3, experts=16, top_k=2, seed=3)
    write_trace(replace(made, meta=replace(made.meta, model="tiny", **SIZES)), home / "theirs" / "trace")
    options = ("--untimed", "--policies", "lru", "--cache-sizes", "24", "--quiet", "--out", "theirs")
    assert moe_sim("sweep", "theirs/trace", *options, cwd=home).returncode == 0
    return home / "theirs"


@pytest.fixture
def theirs(swept: Path, tmp_path: Path) -> Path:
    """Return a copy of a folder of results, whose paths are relative to it."""
    copy = tmp_path / "theirs"
    shutil.copytree(swept, copy)
    return _with(copy, trace="trace")


def _with(folder: Path, policy: str = "lru", **options: str) -> Path:
    held = read_toml(folder / winner.NAME)
    held["setup"] |= {"untimed": False, **options}
    held["winner"][0]["policy"] = policy
    (folder / winner.NAME).write_text(tomli_w.dumps(held))
    return folder


def test_paths_are_relative_to_the_folder(theirs: Path) -> None:
    experiment, _ = winner.read(theirs)
    assert experiment.trace == str((theirs / "trace").resolve())
    assert inputs.read([theirs])[0].loaded


@pytest.mark.parametrize("name", ["trace", "hardware", "model_profile", "expert_sizes", "draft_model"])
@pytest.mark.parametrize("url", ["reference::file:///refs.json", "http://127.0.0.1:9/x.gguf", "simplecache::s3://a/b"])
def test_no_url_is_opened_unless_the_folder_is_trusted_or_it_is_replaced(theirs: Path, name: str, url: str) -> None:
    _with(theirs, **{name: url})
    results = inputs.read([theirs])[0]
    assert results.loaded is None
    assert "--trust-folder" in results.problems[0]
    assert getattr(winner.read(theirs, trust=True)[0], name) == url
    assert getattr(winner.read(theirs, {name: "mine"})[0], name) == "mine"


def test_no_file_of_python_is_run_unless_the_folder_is_trusted(theirs: Path) -> None:
    (theirs.parent / "mine.py").write_text(POLICY)
    _with(theirs, policy="lru+mine.py:Mine@layer")
    replayed = ("--from", "theirs", "--device", "virtual", "--out", "replayed", "--quiet")
    (theirs / "own.toml").write_text('traces = ["trace"]\npolicies = ["lru", "mine.py:Mine"]\ncache_sizes = ["24"]\n')
    sweep = ("sweep", "--config", "theirs/own.toml", "--untimed", "--quiet", "--out", "again")
    for done in (run(replay.commands.main, *replayed, cwd=theirs.parent), moe_sim(*sweep, cwd=theirs.parent)):
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "--trust-folder" in done.stderr
    assert not (theirs.parent / "RAN").exists()
    assert moe_sim(*sweep, "--policies", "lru", cwd=theirs.parent).returncode == 0
    assert moe_sim(*sweep, "--trust-folder", "--overwrite", cwd=theirs.parent).returncode == 0
    assert (theirs.parent / "RAN").exists()


@pytest.mark.parametrize("url", ["reference::file:///refs.json", "simplecache::s3://a/b", "github://a:b@c/", "dir://x"])
def test_other_protocols_and_chains_are_not_opened(url: str) -> None:
    with pytest.raises(InputError, match="is not opened"):
        Shards.open(url)


def test_overwrite_and_resume_change_nothing_outside(theirs: Path) -> None:
    mine = theirs.parent / "mine"
    (mine / CELLS / "results").mkdir(parents=True)
    names = ("results.parquet", "sweep.toml", ".moe-expert-cache", f"{CELLS}/results/{'0' * 16}.parquet")
    for name in names:
        (mine / name).write_text('{"results.parquet": "moe-sim sweep"}')
    marker = json.loads((theirs / ".moe-expert-cache").read_text())
    for name in ("../mine", str(mine), CELLS, "link", "link/cells", "trace/../../mine"):
        marker[name] = "moe-sim sweep"
    (theirs / ".moe-expert-cache").write_text(json.dumps(marker))
    (theirs / "link").symlink_to(mine)
    (theirs / CELLS).symlink_to(mine / CELLS)
    for name in (".results.parquet.part", ".winner.toml.lock", ".moe-expert-cache.lock"):
        (theirs / name).symlink_to(mine / "sweep.toml")
    for options in (("--resume",), ("--overwrite",)):
        done = moe_sim(*SWEEP, "--out", "theirs", *options, cwd=theirs.parent)
        assert done.returncode in (0, 2), done.stderr
        assert all((mine / name).read_text() == '{"results.parquet": "moe-sim sweep"}' for name in names)
    assert done.returncode == 0


def test_a_new_trace_follows_no_links(theirs: Path) -> None:
    mine, trace = theirs.parent / "mine", theirs / "trace"
    shutil.copytree(trace, mine)
    held = {file: file.read_bytes() for file in mine.rglob("*.parquet")}
    shutil.rmtree(trace / "routing")
    (trace / "routing").symlink_to(mine / "routing")
    (trace / ".requests.parquet.tmp").symlink_to(mine / "requests.parquet")
    write_trace(synthetic(3, tokens=4, layers=3, experts=16, top_k=2, seed=4), trace, overwrite=True)
    assert {file: file.read_bytes() for file in mine.rglob("*.parquet")} == held
    assert Shards.open(trace).layers == 3
