"""The page about results, in one HTML file without network.

Whatever comes from data is escaped: by jinja2 in the page, by matplotlib in the figures.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from sim.report import measured, sweep
from sim.report.elements import Item, Section
from sim.report.inputs import RUN_FILE, Results
from sim.results.provenance import commit
from sim.sweeps import config, verdict

TEMPLATE = "page.html"


def written(results: Sequence[Results], command: str) -> tuple[str, list[str]]:
    """Return the page, and what is missing, as sentences. command: the one that makes it again."""
    sweeps = [each for each in results if not each.replayed]
    replays = [each for each in results if each.replayed]
    sections: list[Section] = []
    for each in sweeps:
        sections += sweep.sections(each, several=len(sweeps) > 1)
    sections.append(measured.section(replays))
    sections.append(_commands(results, command))
    for each in sweeps:
        sections += sweep.table(each, several=len(sweeps) > 1)
    problems = [problem for each in results for problem in each.problems]
    return rendered(_title(results), _summary(sweeps), sections, "moe-sim report", problems), problems


def rendered(
    title: str, summary: Sequence[str], sections: Sequence[Section], maker: str, problems: Sequence[str] = ()
) -> str:
    """Return the page. summary: sentences, the answer first; problems: what is missing; maker: the command."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(TEMPLATE).render(
        title=title, summary=summary, problems=problems, sections=sections, maker=maker, commit=commit()
    )


def _title(results: Sequence[Results]) -> str:
    models = dict.fromkeys(row["model"] for each in results for row in each.rows)
    return f"Expert caching of {', '.join(models)}" if models else "Expert caching: no results"


def _summary(sweeps: Sequence[Results]) -> list[str]:
    texts = []
    for each in sweeps:
        said = verdict.sentences(each.rows, each.cells) if each.rows else []
        said += [f"{sweep.where(each)}: these times are not measured."] if each.rows else []
        texts += [f"{each.folder.name}: {text}" if len(sweeps) > 1 and not i else text for i, text in enumerate(said)]
    return texts or ["There is no result to recommend anything by."]


def _commands(results: Sequence[Results], command: str) -> Section:
    lines = []
    for each in results:
        folder = shlex.quote(str(each.folder))
        configured = [above for above in (each.folder, each.folder.parent) if (above / config.NAME).exists()]
        if each.replayed:
            lines += each.commands or [f"# {folder} has no {RUN_FILE}: what was typed is not known"]
        elif configured:
            file, out = (shlex.quote(str(path)) for path in (configured[0] / config.NAME, configured[0]))
            lines.append(f"moe-sim sweep --config {file} --out {out} --resume")
        elif each.rows:
            lines.append(f"# {folder} has no {config.NAME}: what was typed is not known")
    return Section("How to make it again", (Item("code", "\n".join([*dict.fromkeys(lines), command])),))
